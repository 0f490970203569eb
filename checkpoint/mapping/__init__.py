"""Checkpoints as somebody else's names and shapes see them: tables that say what is where.

A table is a list of rules (``rules``), or was traced from a loader (``tracing``). Applied to a
manifest (``table``) it gives one whose tensors are *mapped*: made of copies (``copies``) of stored
ones. Whatever reads them asks the stored ones in their place (``mapped``), so loading, opening,
resharding and exporting know nothing of rules.
"""
