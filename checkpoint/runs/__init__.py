"""The directory of a run: its checkpoints, what is known of them, what of them stays."""
