"""Tests of dtckpt.checkpoint.loading."""
