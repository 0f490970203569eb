"""Pickles of other programs, of which nothing is run."""
