"""Tests of dtckpt.storage.remote."""
