"""Archives of torch.save: where their records lie, and the tensors in them."""
