"""What commands share: options, exit codes, consoles, tables, and texts of values."""
