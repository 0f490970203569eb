"""Whole models under all parallelisms at once, beside one device."""
