"""Tests of dtckpt.checkpoint.files."""
