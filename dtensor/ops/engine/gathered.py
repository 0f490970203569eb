"""Operators that need all values on every rank, and whose results only the values can tell."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from dtckpt.errors import PlacementError

from ...mesh.spec import replicated_spec
from ...tensor.arguments import collect_tensors, map_tensors, substituted
from ...tensor.schemas import Op
from ...tensor.wrapper import Wrapper
from .primitives import replicated
from .table import decomposition


def run_gathered(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Return what ``op`` returns for whole tensors, replicated.

    Raises PlacementError on a rank outside of the mesh, which cannot know the shapes.
    """
    leaves: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], leaves)
    # Random numbers are drawn in the order of memory, which is not the same for all layouts.
    wholes = [gathered_local(op, leaf).contiguous() for leaf in leaves]
    first = next(leaf for leaf in leaves if isinstance(leaf, Wrapper))
    mesh, cls = first.spec.mesh, type(first)
    whole_args, whole_kwargs = substituted(args, kwargs, wholes)

    def wrap(made: Tensor) -> Tensor:
        return cls(made, replicated_spec(mesh, made))

    return map_tensors(wrap, op(*whole_args, **whole_kwargs))


def gathered_local(op: Op, leaf: Tensor) -> Tensor:
    """Return all values of a tensor on this rank, for the result of ``op``."""
    if not isinstance(leaf, Wrapper):
        return leaf
    if leaf.spec.box is None:
        raise PlacementError(
            f"{op}({leaf.spec}) has a result whose shape depends on values, and this rank, which "
            "is not in the mesh, has none; call it on ranks of the mesh"
        )
    return replicated(leaf, range(leaf.spec.mesh.ndim)).local


def on_gathered(*ops: Op) -> None:
    """Register decompositions that run operators on all values: only these tell the results."""
    for op in ops:
        decomposition(op)(partial(run_gathered, op))
