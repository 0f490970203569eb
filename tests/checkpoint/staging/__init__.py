"""Copies of what is to be written."""
