"""The end-to-end demonstration behind ``make demo``."""
