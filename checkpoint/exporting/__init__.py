"""Exporting checkpoints as files that other programs load."""
