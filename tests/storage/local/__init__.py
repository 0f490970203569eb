"""Tests of dtckpt.storage.local."""
