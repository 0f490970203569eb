"""Tests of dtckpt.checkpoint.state."""
