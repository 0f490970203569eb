"""Views that are copies, and parts that lie in memory otherwise than the whole."""
