"""How Dynamo comes to nodes. Importing this imports Dynamo, so that nobody else does."""

from __future__ import annotations

from typing import Any

import torch

from .nodes import NODES, can_be_told, heard, told


@torch.compiler.allow_in_graph
def _call(name: str, *args: Any) -> Any:
    return NODES[name](*[heard(arg) for arg in args])


def _between_graphs(name: str, *args: Any) -> Any:
    return NODES[name](*args)


_call_between_graphs: Any = torch.compiler.disable(_between_graphs)


def run_node(name: str, *args: Any) -> Any:
    """Return what the node of that name returns; Dynamo, which alone comes here, records it.

    With other arguments than a graph can have, meshes of torch for instance, the graph breaks.
    """
    if all(can_be_told(arg) for arg in args):
        return _call(name, *[told(arg) for arg in args])
    return _call_between_graphs(name, *args)
