"""What a reshard would do to every tensor, worked out from the manifest alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dtckpt.errors import LayoutMismatch, PlacementError

from ..dtensor import IrregularLayout, Layout

if TYPE_CHECKING:
    from ..checkpoint import Manifest, Rule
    from ..checkpoint.plan import StoredTensor
    from ..dtensor import Mesh

_MAX_PROBLEMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A tensor and the layout that it will have."""

    tensor: StoredTensor
    layout: Layout | IrregularLayout
    rule: Rule | None
    """The rule that placed it."""
    note: str
    """Why no rule did, or why the rule does not matter."""


def plan(manifest: Manifest, mesh: Mesh, rules: Sequence[Rule]) -> list[Planned]:
    """Return every tensor's new layout, as ``dtckpt.checkpoint.reshard`` would choose it.

    LayoutMismatch lists the tensors that their rule does not fit.
    """
    planned: list[Planned] = []
    problems: list[str] = []
    for tensor in manifest.tensors.values():
        try:
            planned.append(_planned(tensor, mesh, rules))
        except PlacementError as error:
            problems.append(f"tensor {tensor.name!r}: {error}")
    if problems:
        rest = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS] + ([f"and {rest:,} more tensors"] if rest > 0 else [])
        raise LayoutMismatch("the rules do not fit the checkpoint:\n  " + "\n  ".join(shown))
    return planned


def unused(planned: Sequence[Planned], rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules that place no tensor."""
    used = {item.rule for item in planned}
    return [rule for rule in rules if rule not in used]


def bytes_by_rank(planned: Sequence[Planned]) -> dict[int, int]:
    """Return how many bytes of tensors every rank will hold."""
    held: dict[int, int] = {}
    alike = Counter((item.layout, item.tensor.dtype.itemsize) for item in planned)
    for (layout, itemsize), times in alike.items():
        if isinstance(layout, IrregularLayout):
            boxes = list(layout.pieces)
        else:
            mesh = layout.mesh
            boxes = [(mesh.rank(at), layout.box(at)) for at in mesh.coordinates()]
        for rank, box in boxes:
            held[rank] = held.get(rank, 0) + box.numel * itemsize * times
    return dict(sorted(held.items()))


def _planned(tensor: StoredTensor, mesh: Mesh, rules: Sequence[Rule]) -> Planned:
    if any(part.startswith("@") for part in tensor.name.split("/")):
        return Planned(tensor=tensor, layout=tensor.layout, rule=None, note="stays with its rank")
    rule = next((rule for rule in rules if fnmatchcase(tensor.name, rule.pattern)), None)
    if rule is None or not tensor.shape:
        layout = Layout.replicated(mesh, tensor.shape)
        note = "no rule" if rule is None else "0-d"
    else:
        layout, note = Layout(mesh, rule.placements, tensor.shape), ""
    return Planned(tensor=tensor, layout=layout, rule=rule, note=note)
