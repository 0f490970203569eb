"""Tests of dtckpt.checkpoint.optimizers."""
