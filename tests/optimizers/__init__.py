"""Optimizers of torch and of others, saved and resumed in each form of parallelism.

``make optimizers`` runs the whole matrix: every optimizer x {fresh, used, after a rollback} x
{single, DDP, FSDP2, TP, our DTensor} x {same mesh, other mesh}. ``test_pairwise`` runs a part of it
in which each two of these meet.
"""
