"""Commands that keep or remove the checkpoints of a run."""
