"""Checkpoints as somebody else's names and shapes see them: tables that say what is where.

A table (``table``) is a list of rules that people write (``rules``, ``part_rules``), or was traced
from a loader (``tracing``). Applied to a manifest it gives one whose tensors are made of others;
whatever reads them asks the stored ones in their place, so loading, opening, resharding and
exporting know nothing of rules.
"""
