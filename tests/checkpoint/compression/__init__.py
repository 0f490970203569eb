"""Tests of dtckpt.checkpoint.compression."""
