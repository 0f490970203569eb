"""Checkpoints of any program: which lie where, and the manifest that each of them would have."""
