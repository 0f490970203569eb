"""Checkpoints rewritten for other ranks, dtypes and names: what each tensor becomes, and files."""
