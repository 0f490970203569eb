"""What saves and loads cost: recorded by each rank, summed up over all, told to whoever asks."""
