"""Steps of training beside torch's parallelisms."""
