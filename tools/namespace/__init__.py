"""Distributed checkpoints for PyTorch that load on any mesh and any placement.

Installed as ``dtckpt/__init__.py``. It imports nothing, so that ``import dtckpt.dtensor`` does
not load ``dtckpt.checkpoint``, and neither loads the command line.
"""
