"""What lies on disk, how it is written and checked, and the commit."""
