"""Benchmarks of checkpoints beside their peers and the limits of the machine (``make bench``)."""
