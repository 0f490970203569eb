"""Tests of dtckpt.checkpoint.saving."""
