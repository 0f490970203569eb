"""Tests of dtckpt.checkpoint.tensors."""
