"""Tests of dtckpt; helpers that several test modules share live in this package."""

import os

# Torch 2.11 notes every collective of Gloo in one map of the process, which no lock protects: where
# ranks are threads that map is torn, and the process crashes or hangs. Read when a group first
# notes something; 0 turns the notes off. (Torch 2.13 has the lock.)
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
