"""Tests of dtckpt.checkpoint.ranks."""
