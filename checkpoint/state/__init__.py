"""Structure, names and values of a state dict: everything of it but tensors."""
