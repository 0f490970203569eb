"""Which tensors are read in stripes, each by one rank for all.

These are tensors that would be read several times otherwise: ranks want different parts of the
same blocks. Of those that have a recipe the stored ones are exchanged that they are made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...dtensor.geometry.box import Box, first_overlap
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ..files.stored_tensor import StoredTensor
from ..reading.wants import Want, stored_wants
from ..tensors.local_tensor import LocalTensor
from ..tensors.sink import Array
from .stripes import StripedTensor, sampled_bytes, times_read

_MOST_BOXES = 1024
"""Of stored tensors that all ranks want for one tensor: each rank has to find all of them."""


@dataclass(slots=True)
class Striped:
    """What is read in stripes."""

    names: set[str] = field(default_factory=set[str])
    """Of the tensors that are filled."""
    tensors: dict[str, StripedTensor] = field(default_factory=dict[str, StripedTensor])
    """What is exchanged for them."""
    times: float = 0.0
    """How many times it would be read otherwise; 0 if there is nothing."""
    num_bytes: int = 0
    """As they are stored."""

    @staticmethod
    def key(name: str, *, is_part: bool) -> str:
        """Return where a stored tensor is in ``tensors``: as itself, or as a part of another."""
        return f"[{name}]" if is_part else name


def find_striped(
    tensors: Mapping[str, LocalTensor],
    stored: Mapping[str, StoredTensor],
    all_ranks: tuple[int, ...],
    rank: int,
    among_replicas: Container[str],
    min_times: float,
    *,
    with_plain: bool = False,
) -> Striped:
    """Return what is to be exchanged, and how many times it would be read otherwise.

    These are tensors that would be read at least ``min_times``: for those ``among_replicas``
    without counting these, since broadcasts serve them as well. Every rank of the load must know
    what every other one wants, so only layouts on all of them count; ``with_plain`` also tensors
    that each of them has as a whole.
    """
    everyone = sorted(all_ranks)
    known: dict[tuple[object, ...], tuple[float, bool, tuple[Box, ...]]] = {}
    found = Striped()
    made: dict[str, _Boxes] = {}
    replicas: dict[tuple[int, ...], Layout] = {}
    line = Mesh((len(all_ranks),), ranks=all_ranks)
    read_bytes = 0.0
    for name, local in tensors.items():
        layout, saved = local.layout, stored[name]
        if with_plain and local.is_plain:
            if local.shape not in replicas:
                replicas[local.shape] = Layout(line, (Replicate(),), local.shape)
            layout = replicas[local.shape]
        if layout is None or 0 in layout.shape:
            continue
        if saved.recipe is not None and not saved.recipe.in_any_order:
            continue
        rule = id(saved.layout), saved.writers, saved.cut, saved.dtype.itemsize, id(saved.recipe)
        key = (*rule, layout)
        if key not in known:
            is_usable = sorted(layout.mesh.all_ranks()) == everyone
            times = _times(saved, layout) if is_usable else 0.0
            known[key] = times, is_usable, tuple(layout.held_by(rank))
        times, is_usable, held = known[key]
        all_times = times * layout.num_replicas
        enough = times if name in among_replicas else all_times
        if not (is_usable and enough >= min_times and _holds(local, held)):
            continue
        if saved.recipe is None:
            found.tensors[name] = StripedTensor(saved, layout)
        elif (boxes := _boxes_of_all(saved, layout, everyone)) is not None:
            made[name] = boxes
        else:
            continue
        found.names.add(name)
        found.num_bytes += saved.num_bytes
        read_bytes += all_times * saved.num_bytes
    _add_sources(found, made)
    found.times = read_bytes / found.num_bytes if found.num_bytes else 0.0
    return found


def _holds(local: LocalTensor, held: tuple[Box, ...]) -> bool:
    """Whether the mesh numbers ranks as the load does."""
    return bool(local.parts) and tuple(box for box, _ in local.parts) == held


_Boxes = list[tuple[StoredTensor, int, Box]]
"""Boxes of stored tensors, and the rank that wants them."""


def _add_sources(found: Striped, made: dict[str, _Boxes]) -> None:
    """Add what tensors are made of, all for which they need the same, or no tensor at all."""
    while True:
        sources: dict[str, tuple[StoredTensor, dict[tuple[int, Box], None]]] = {}
        for boxes in made.values():
            for source, rank, box in boxes:
                sources.setdefault(source.name, (source, {}))[1][rank, box] = None
        entangled = {
            name
            for name, (_, pieces) in sources.items()
            if first_overlap(list(dict.fromkeys(box for _, box in pieces))) is not None
        }
        if not entangled:
            break
        for name, boxes in list(made.items()):
            if any(source.name in entangled for source, _, _ in boxes):
                del made[name]
                found.names.discard(name)
    for name, (source, pieces) in sources.items():
        key = Striped.key(name, is_part=True)
        striped = source._replace(name=key, same_as=source.stored_name)
        found.tensors[key] = StripedTensor(striped, IrregularLayout(source.shape, tuple(pieces)))


def _boxes_of_all(tensor: StoredTensor, layout: Layout, everyone: Sequence[int]) -> _Boxes | None:
    """Return the boxes of stored tensors that all ranks want; None where these are too many."""
    found: _Boxes = []
    known: dict[Box, list[tuple[StoredTensor, Box]]] = {}
    for rank in everyone:
        for box in layout.held_by(rank):
            if box not in known:
                made = itertools.islice(_made_of(tensor, box, exact=True), _MOST_BOXES + 1)
                known[box] = list(made)
            found += [(source, rank, part) for source, part in known[box]]
            if len(found) > _MOST_BOXES:
                return None
    return found


def _made_of(
    tensor: StoredTensor, box: Box, *, exact: bool = False
) -> Iterator[tuple[StoredTensor, Box]]:
    """Yield the boxes of stored tensors that a box is made of."""
    want = Want(tensor=tensor, box=box, sink=_Nowhere())
    for made in stored_wants([want], exact=exact):
        if isinstance(made, Want):
            yield made.tensor, made.box


class _Nowhere:
    """A sink for what is only planned."""

    is_memory = False

    def memory(self) -> None:
        """Return None."""

    def put(self, part: Box, items: Array) -> None:
        """Take nothing."""


def _times(tensor: StoredTensor, layout: Layout) -> float:
    """Return how many bytes ranks would read, each for itself, for one byte that they want.

    Of tensors that have a recipe by what one rank wants.
    """
    if tensor.recipe is None:
        return times_read(tensor, layout)
    wanted_bytes = read_bytes = 0.0
    for box in layout.held_by(next(iter(layout.mesh.all_ranks()))):
        wanted_bytes += box.numel * tensor.dtype.itemsize
        for source, part in itertools.islice(_made_of(tensor, box), _MOST_BOXES):
            wanted, read = sampled_bytes(source, part)
            read_bytes += part.numel * source.dtype.itemsize * read / max(wanted, 1)
    return read_bytes / wanted_bytes if wanted_bytes else 0.0
