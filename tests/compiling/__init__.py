"""Models and functions of DTensors under torch.compile, compared with what they do without it."""
