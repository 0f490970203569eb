"""What ranks have saved into files of their own, each its part, as one checkpoint."""
