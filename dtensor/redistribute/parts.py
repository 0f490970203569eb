"""Tensors without a mesh of their own: lists of boxes moved into any layout, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers, all_gather
from ..comm.message_parts import ViewPart
from ..comm.packing import Messages
from ..geometry.box import Box
from ..geometry.flows import Flows, PartFlow
from ..geometry.irregular import IrregularLayout
from ..geometry.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_rows
from ..mesh.same_mesh import code_of
from .memory import require_memory
from .steps import Needs

_DTYPES = sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str)
_SHOWN = 4


def redistribute_parts(
    parts: Mapping[Box, Tensor],
    source: Layout | IrregularLayout,
    target: Layout | IrregularLayout,
    mesh: DeviceMesh,
) -> dict[Box, Tensor]:
    """Return this rank's parts of a tensor in one layout, from those that it has in another.

    ``parts`` are the boxes that this rank holds in ``source``, each with its elements; an empty
    one may be left out. Those of ``target`` come on the mesh's device, in memory of their own; a
    rank of a ``Layout`` has one, be it empty, and other ranks have none. Ranks are global ones.
    Nothing is recorded for autograd. Every rank of ``mesh``, which has all ranks of both layouts,
    must call. Raises PlacementError on all of them, before anything moves, where on one of them the
    parts are not those of the layout or the layouts are none; torch.OutOfMemoryError as
    ``redistribute`` does.
    """
    job = _Job(source, target, mesh)
    if mesh.get_coordinate() is None:
        return {}
    problem = ""
    try:
        job.check(parts)
    except Exception as error:  # whatever it is: the others wait for what this rank says
        problem = str(error) or repr(error)
    dtype, most_bytes = job.agree(problem)
    return job.move(parts, dtype, most_bytes)


@dataclass(slots=True)
class _Job:
    """What one rank does to move the parts of one tensor."""

    source: Layout | IrregularLayout
    target: Layout | IrregularLayout
    mesh: DeviceMesh
    given: list[PartFlow] = field(default_factory=list)
    """Who gets what of which box that is held here."""
    taken: list[PartFlow] = field(default_factory=list)
    """Who gives what of which box that is to be held here."""
    dtype: torch.dtype | None = None
    """Of the parts; None where there are none."""

    def check(self, parts: Mapping[Box, Tensor]) -> None:
        """Plan the move; PlacementError where it is none."""
        if self.source.shape != self.target.shape:
            raise PlacementError(
                f"layouts of shapes {self.source.shape} and {self.target.shape} are not of one "
                "tensor"
            )
        everyone = set(self.mesh.layout_mesh.all_ranks())
        for layout in (self.source, self.target):
            if isinstance(layout, IrregularLayout):
                layout.validate()
            elif layout.is_partial:
                raise PlacementError(
                    f"{layout} has terms of values; parts are values: redistribute a DTensor first"
                )
            if not everyone.issuperset(layout.all_ranks()):
                outside = sorted(set(layout.all_ranks()) - everyone)[:_SHOWN]
                raise PlacementError(
                    f"ranks {outside} hold something, and are not in mesh {self.mesh.layout_mesh}; "
                    "pass a mesh of all ranks of both layouts"
                )
        here = self.mesh.get_rank()
        self._check_parts(parts, self.source.held_by(here))
        flows = Flows(self.source, self.target)
        self.given, self.taken = flows.sent_by(here), flows.received_by(here)

    def _check_parts(self, parts: Mapping[Box, Tensor], held: Sequence[Box]) -> None:
        lacking = [box for box in held if box not in parts and not box.is_empty]
        foreign = [box for box in parts if box not in held and not box.is_empty]
        if lacking or foreign:
            raise PlacementError(
                f"the parts are not those of the layout: it has {_listed(held)}, of which "
                f"{_listed(lacking)} are missing, and not {_listed(foreign)}"
            )
        for box, tensor in parts.items():
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise PlacementError(f"the part {box} is a {type(tensor).__name__}; pass a Tensor")
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise PlacementError(f"the part {box} is sparse or quantized; pass a dense tensor")
            if tuple(tensor.shape) != box.sizes or tensor.is_meta:
                kind = "a meta tensor" if tensor.is_meta else f"of shape {tuple(tensor.shape)}"
                raise PlacementError(f"the part {box} is {kind}; pass its {box.sizes} elements")
        dtypes = sorted({tensor.dtype for tensor in parts.values()}, key=str)
        if len(dtypes) > 1:
            raise PlacementError(f"parts have the dtypes {dtypes}; make them one")
        self.dtype = dtypes[0] if dtypes else None

    def agree(self, problem: str) -> tuple[torch.dtype, int]:
        """Return the dtype of all parts and the most bytes that a rank sends or receives.

        PlacementError on all ranks if one of them has a problem, or if they differ.
        """
        text = problem.encode()
        told = "" if problem else f"{self.source.to_json()} {self.target.to_json()}"
        number = -1 if self.dtype is None else _DTYPES.index(self.dtype)
        most = max(self._moved(self.given), self._moved(self.taken))
        found = gather_rows([len(text), code_of(told), number, most], self.mesh)
        rows = dict(zip(self.mesh.layout_mesh.all_ranks(), found.values(), strict=True))
        if any(row[0] for row in rows.values()):
            self._raise(text, {rank: row[0] for rank, row in rows.items()})
        first = min(rows)
        others = [rank for rank, row in rows.items() if row[1] != rows[first][1]]
        if others:
            raise PlacementError(
                f"redistribute_parts: ranks {others[:_SHOWN]} have other layouts than rank "
                f"{first}; pass the same two on all ranks"
            )
        dtypes = {row[2]: rank for rank, row in rows.items() if row[2] >= 0}
        if len(dtypes) > 1:
            listed = ", ".join(f"{_DTYPES[n]} on rank {rank}" for n, rank in dtypes.items())
            raise PlacementError(f"redistribute_parts: parts are {listed}; make them one dtype")
        dtype = _DTYPES[next(iter(dtypes))] if dtypes else torch.get_default_dtype()
        return dtype, max(row[3] for row in rows.values()) * dtype.itemsize

    def _moved(self, parts: Sequence[PartFlow]) -> int:
        here = self.mesh.get_rank()
        return sum(common.numel for other, _, common in parts if other != here)

    def _raise(self, text: bytes, lengths: Mapping[int, int]) -> None:
        """Raise with the problem of the first rank that has one."""
        own = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8).to(self.mesh.device)
        shapes = [(max(length, 1),) for length in lengths.values()]
        told = all_gather(own, shapes, self._peers())
        rank, problem = next(
            (rank, part) for (rank, n), part in zip(lengths.items(), told, strict=True) if n
        )
        raise PlacementError(
            f"redistribute_parts: rank {rank}: {bytes(problem.cpu().tolist()).decode()}"
        )

    def move(
        self, parts: Mapping[Box, Tensor], dtype: torch.dtype, most_bytes: int
    ) -> dict[Box, Tensor]:
        """Return the new parts."""
        here, device, peers = self.mesh.get_rank(), self.mesh.device, self._peers()
        costs = self.mesh.cost_model()
        boxes = self.target.held_by(here)
        sizes = [box.numel * dtype.itemsize for box in boxes]
        buffer = min(most_bytes, costs.round_bytes)
        require_memory([Needs(peers, most_bytes, (*sizes, buffer, buffer))], device)
        made = {box: torch.empty(box.sizes, dtype=dtype, device=device) for box in boxes}
        given = {box: tensor.detach() for box, tensor in parts.items()}
        ranks = self.mesh.layout_mesh.all_ranks()
        group_rank = dict(zip(ranks, peers.group_ranks, strict=True))
        sends: list[list[ViewPart]] = [[] for _ in ranks]
        receives: list[list[ViewPart]] = [[] for _ in ranks]
        for taker, held, common in self.given:
            view = given[held][common.relative_to(held).slices]
            sends[group_rank[taker]].append(ViewPart(view))
        for giver, wanted, common in self.taken:
            view = made[wanted][common.relative_to(wanted).slices]
            receives[group_rank[giver]].append(ViewPart(view))
        own = group_rank[here]
        for old, new in zip(sends[own], receives[own], strict=True):
            new.tensor.copy_(old.tensor)
        sends[own], receives[own] = [], []
        if most_bytes:
            Messages(sends, receives, peers, device).start(most_bytes, costs)()
        return made

    def _peers(self) -> Peers:
        return self.mesh.peers(tuple(range(self.mesh.ndim)))


def _listed(boxes: Sequence[Box]) -> str:
    shown = ", ".join(map(str, boxes[:_SHOWN]))
    return f"{shown or 'none'}{', ...' if len(boxes) > _SHOWN else ''}"
