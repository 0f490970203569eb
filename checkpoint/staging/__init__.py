"""Copies of what is to be written, made at once or while the training goes on."""
