"""Formats, planning, saving and loading of sharded state."""
