"""Tests of ``dtckpt.storage``."""
