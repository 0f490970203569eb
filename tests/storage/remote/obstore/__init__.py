"""Tests of dtckpt.storage.remote.obstore."""
