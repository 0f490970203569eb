"""Attention over a sequence that several ranks share: context parallelism."""
