"""Tests of what is under tools/."""
