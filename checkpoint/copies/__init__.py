"""Tensors that are made of copies of stored ones: which elements go where, and how they are read.

A copy (``copies``) is a nest of loops with a stride on either side. ``meeting`` follows copies
through copies, ``boxes`` finds what is to be read for one, ``sinks`` put it where it belongs.
``mapped`` is what all of this is for. Nothing here knows of rules, or of torch.
"""
