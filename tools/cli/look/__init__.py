"""Commands that show what is there and change nothing."""
