"""``dtckpt report``: pages about a checkpoint or a run that a browser shows, without a network."""
