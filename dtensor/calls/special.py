"""Calls that need no mesh to be looked at: those that return no tensor, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.message_parts import has_own_operators
from ..mesh.torch_layouts import TRANSLATE
from ..ops.engine.table import ACROSS_MESHES
from ..redistribute import redistribute_local
from ..tensor.schemas import Op
from ..tensor.wrapper import Wrapper
from ..torch_private import NotRecorded, base_of, is_traced
from .call import Call

aten = torch.ops.aten
wait_tensor = torch.ops._c10d_functional.wait_tensor.default

_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor"})
"""Namespaces of torch's operators that ranks run together on tensors of their own."""


def run_special(call: Call) -> Any:
    """Return what a special operator returns, NotImplemented for any other one.

    Raises PlacementError where torch's DTensors stand beside ours, or a collective takes ours.
    """
    op, args = call.op, call.args
    if op is wait_tensor:
        return args[0]  # waits when it is first needed
    _refuse_foreign(call)
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **call.kwargs)
    if op is aten.copy_.default and _is_reshaped_self(args[0], args[1]):
        return args[0]
    return NotImplemented


def _refuse_foreign(call: Call) -> None:
    if call.op.namespace in _COLLECTIVES:
        raise PlacementError(
            f"{call.op}: a collective of torch takes the tensors that ranks have, and a DTensor is "
            "the same on all of them; use redistribute(), or pass its to_local()"
        )
    for index, leaf in enumerate(call.tensors):
        if isinstance(leaf, torch_tensor.DTensor):
            raise PlacementError(
                f"{call.op}: tensor {index} is a DTensor of torch, of shape {list(leaf.shape)} and "
                f"placements {leaf.placements}, beside DTensors of dtckpt; {TRANSLATE}"
            )


def _is_reshaped_self(target: Tensor, source: Tensor | complex) -> bool:
    """Whether torch copies a view to its tensor, as ``matmul(out=)`` does for all but real memory.

    It has written through the view, so that the tensor holds the values already. The source may
    be a number, too.
    """
    if not isinstance(source, Tensor) or base_of(source) is not target:
        return False
    return source.numel() == target.numel() and source.shape != target.shape


def _item(tensor: Wrapper) -> Any:
    spec = tensor.spec
    if spec.box is None:
        raise PlacementError(
            f"{spec} has no values on this rank, which is not in its mesh {spec.mesh.layout_mesh}; "
            "ask for them on a rank of the mesh"
        )
    if is_traced(tensor.local):
        raise NotRecorded(f"the value of {spec}, which a graph does not have while it is recorded")
    local = tensor.local
    if has_own_operators(local):  # what its number is only the class knows
        local = torch.tensor(local.item(), dtype=spec.dtype, device=local.device)
        local = local.view(spec.local_shape)
    return redistribute_local(local, spec, spec.replicated()).item()


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    same = left == right
    return bool(same.all().item())


def _is_same_size(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape


_SPECIAL: dict[Op, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.is_same_size.default: _is_same_size,
    **ACROSS_MESHES,
}
"""Operators that return no tensor, and those on lists that are looked at as a whole."""
