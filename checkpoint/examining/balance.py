"""How much of a state each rank holds, and how evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout

if TYPE_CHECKING:
    from ..files.manifest import Manifest


def bytes_by_rank(tensors: Iterable[tuple[Layout | IrregularLayout, int]]) -> dict[int, int]:
    """Return how many bytes every rank holds of tensors, given as layout and bytes an element."""
    held: dict[int, int] = {}
    for (layout, itemsize), times in Counter(tensors).items():
        if isinstance(layout, IrregularLayout):
            boxes = list(layout.pieces)
        else:
            mesh = layout.mesh
            boxes = [(mesh.rank(at), layout.box(at)) for at in mesh.coordinates()]
        for rank, box in boxes:
            held[rank] = held.get(rank, 0) + box.numel * itemsize * times
    return dict(sorted(held.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly bytes are spread over ranks or files."""

    num: int
    total_bytes: int
    least_bytes: int
    most_bytes: int
    least: int
    """Number of the first rank or file that has the fewest."""
    most: int

    @property
    def mean_bytes(self) -> float:
        """Bytes of one, if all had as many."""
        return self.total_bytes / self.num

    @property
    def most_over_mean(self) -> float:
        """1 where all have as many; how much longer than needed the others wait for the one."""
        return self.most_bytes / self.mean_bytes if self.total_bytes else 1.0


def balance_of(held: Mapping[int, int]) -> Balance | None:
    """Return how evenly bytes are spread, by the number of a rank or file; None for none."""
    if not held:
        return None
    least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
    return Balance(
        num=len(held),
        total_bytes=sum(held.values()),
        least_bytes=held[least],
        most_bytes=held[most],
        least=least,
        most=most,
    )


_MAX_BOXES = 100_000
"""Boxes that are worked out to tell what ranks hold: a third of a second."""


def held_by_ranks(manifest: Manifest) -> dict[int, int]:
    """Return how many bytes of tensors every rank had that saved, replicas counted with each.

    Empty where another program does not say what ranks held, and where working it out takes long:
    for hundreds of layouts on thousands of ranks.
    """
    layouts = [(t.layout, t.dtype.itemsize) for t in manifest.tensors.values() if not t.same_as]
    if not manifest.is_ours or sum(_num_boxes(of) for of, _ in set(layouts)) > _MAX_BOXES:
        return {}
    return bytes_by_rank(layouts)


def rank_balance(manifest: Manifest) -> Balance | None:
    """Return how evenly the ranks that saved hold the tensors; None where that is not told."""
    return balance_of(held_by_ranks(manifest))


def file_balance(manifest: Manifest) -> Balance | None:
    """Return how evenly the bytes of a checkpoint are spread over its files."""
    return balance_of({record.rank: record.size for record in manifest.files})


def _num_boxes(layout: Layout | IrregularLayout) -> int:
    return len(layout.pieces) if isinstance(layout, IrregularLayout) else layout.mesh.size
