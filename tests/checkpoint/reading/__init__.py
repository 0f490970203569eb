"""Tests of dtckpt.checkpoint.reading."""
