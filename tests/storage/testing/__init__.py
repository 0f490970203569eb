"""Tests of dtckpt.storage.testing."""
