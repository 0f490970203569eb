"""Tests of dtckpt.checkpoint."""
