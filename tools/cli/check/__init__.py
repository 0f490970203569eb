"""Commands that find faults and differences; their exit code tells whether there are any."""
