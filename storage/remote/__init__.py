"""Stores that are asked over a network, an engine each: ``fsspec`` and ``obstore``.

What both share is beside them: how a server is asked, and what its failures mean.
"""
