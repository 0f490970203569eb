"""Models and tensors of real frameworks, taken as they are."""
