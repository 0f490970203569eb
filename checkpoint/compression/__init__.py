"""Blocks of checkpoints made smaller: the codec, threads that run it, and whether it pays."""
