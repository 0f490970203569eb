"""State of optimizers and schedulers, which goes by the names of parameters."""
