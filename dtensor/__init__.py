"""Meshes, placements, layouts and distributed tensors."""
