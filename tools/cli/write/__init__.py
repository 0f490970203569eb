"""Commands that write a checkpoint, or parts of one, anew in another form or place."""
