"""Tests of dtckpt.checkpoint.sharing."""
