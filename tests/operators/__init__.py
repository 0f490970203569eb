"""Every operator of torch's database on distributed tensors, compared with one device."""
