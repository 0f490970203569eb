"""What has no place in a call on DTensors of ours: those of torch, and torch's collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed.tensor as torch_tensor
from torch import Tensor

from dtckpt.errors import PlacementError

from ..mesh.torch_layouts import TRANSLATE
from ..tensor.arguments import collect_tensors
from ..tensor.schemas import Op

_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor"})
"""Namespaces of torch's operators that ranks run together on tensors of their own."""


def refuse_foreign(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise PlacementError where torch's DTensors stand beside ours, or a collective takes ours."""
    if op.namespace in _COLLECTIVES:
        raise PlacementError(
            f"{op}: a collective of torch takes the tensors that ranks have, and a DTensor is the "
            "same on all of them; use redistribute(), or pass its to_local()"
        )
    leaves: list[Tensor] = []
    collect_tensors(args, leaves)
    collect_tensors(kwargs.values(), leaves)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch_tensor.DTensor):
            raise PlacementError(
                f"{op}: tensor {index} is a DTensor of torch, of shape {list(leaf.shape)} and "
                f"placements {leaf.placements}, beside DTensors of dtckpt; {TRANSLATE}"
            )
