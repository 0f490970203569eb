"""What the families of operators are written in: rows, factors, forms, and the choice."""
