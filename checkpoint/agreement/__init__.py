"""Ranks agree, beside the training, on a call that all of them make alike."""
