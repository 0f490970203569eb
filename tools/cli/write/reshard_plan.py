"""What a reshard would mean for its rules and tensors, without consoles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....checkpoint.examining.balance import bytes_by_rank
from ....dtensor import IrregularLayout, Layout

if TYPE_CHECKING:
    from ....checkpoint import Placed, Rule
    from ....checkpoint.files.stored_tensor import StoredTensor
    from ....checkpoint.resharding.changes import Plan


def unused(placed: Sequence[Placed], rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules that place no tensor."""
    used = {item.rule for item in placed}
    return [rule for rule in rules if rule not in used]


def held_by_rank(plan: Plan) -> dict[int, int]:
    """Return the bytes that every rank would hold."""
    return bytes_by_rank((tensor.layout, tensor.dtype.itemsize) for tensor in plan.tensors)


def plan_document(plan: Plan, *, source: str, target: str) -> dict[str, Any]:
    """Return what ``--dry-run`` shows."""
    pairs = zip(plan.placed, plan.tensors, strict=True)
    return {
        "source": source,
        "target": target,
        "num_bytes": plan.num_bytes,
        "tensors": {new.name: _tensor(item, new) for item, new in pairs},
        "held_bytes": held_by_rank(plan),
    }


def _tensor(item: Placed, new: StoredTensor) -> dict[str, Any]:
    return {
        "shape": list(new.shape),
        "old": _state(item.tensor.dtype.torch_name, item.tensor.layout),
        "new": _state(new.dtype.torch_name, item.layout),
        "rule": None if item.rule is None else item.rule.pattern,
        "note": item.note,
    }


def _state(dtype: str, layout: Layout | IrregularLayout) -> dict[str, Any]:
    if isinstance(layout, IrregularLayout):
        return {"dtype": dtype, "boxes": layout.to_json()["boxes"]}
    placements = [str(placement) for placement in layout.placements]
    return {"dtype": dtype, "mesh": layout.mesh.to_json(), "placements": placements}
