"""Tests of dtckpt.storage.remote.fsspec."""
