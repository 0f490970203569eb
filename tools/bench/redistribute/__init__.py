"""Redistribute beside torch's DTensor: bytes, memory and plans of all pairs, and wall time."""
