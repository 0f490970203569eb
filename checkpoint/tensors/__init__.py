"""Tensors of a state dict: what a rank holds of them, and their bytes out and in."""
