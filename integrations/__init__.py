"""Adapters: frameworks that save and load by dtckpt, each a module named like the framework.

None is loaded before it is imported (``from dtckpt.integrations.lightning import DtckptIO``), and
nothing else of dtckpt imports a framework. What they save are ordinary checkpoints.
"""
