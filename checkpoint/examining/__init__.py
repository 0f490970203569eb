"""What the values of checkpoints are like, how two differ, and what a load of one would cost."""
