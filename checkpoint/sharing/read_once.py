"""Whether ranks read once what several of them would read, and which tensors.

On one host they read into memory that all of them see (``sharing``). Else there are two ways. A
region that replicas hold is read by one of them and broadcast to the others
(``broadcasting``). A tensor of which ranks want different parts of the same blocks is read in
stripes, each by one rank, and exchanged (``exchanging``). Both need all ranks to make the same
collective calls in the same order. So they compare a fingerprint of their destinations first, and
each reads for itself where these differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
import xxhash

from dtckpt.errors import PlacementError

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ...dtensor.mesh.device_mesh import DeviceMesh
from ...storage.base import Store
from ..reading import limits
from ..tensors.local_tensor import LocalTensor
from .striping import Striped

MIN_REPLICAS = 4
"""From so many replicas on, reading once is chosen where reading is expensive."""
MIN_TIMES_ASKED = 1.25
"""And so many times where reading once was asked for."""

MIN_LOCAL_RANKS = 2
"""So many ranks of one host read once, into memory that they share, wherever the files are."""

Group = Literal["everyone"] | tuple[Mesh, int]
"""Ranks that want the same: all of the load, or those along one axis of a mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shareable:
    """A tensor of which this rank's part is wanted by others too."""

    name: str
    group: Group
    num_replicas: int
    mesh: Any = None
    """The device mesh, of ours or torch's, where the group is along an axis of it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells about reading once, before anything is read."""

    asked: bool | None
    host: str
    fingerprint: str = ""
    """Of all destinations and groups; empty where there is nothing to share."""
    times: float = 0.0
    """How many times stored bytes would be read that are to be exchanged; 0 if there are none."""
    has_replicas: bool = True
    """Whether there is something to broadcast."""
    in_memory: str = ""
    """As ``fingerprint``, of what it can share by memory with the others, all on its host."""
    times_in_memory: float = 0.0
    """As ``times``, of that."""

    @property
    def has_something(self) -> bool:
        """Whether others may read for this rank, in one way or another."""
        return bool(self.fingerprint or self.in_memory)

    def to_bytes(self) -> bytes:
        """Return JSON."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Return what ``to_bytes`` was called on."""
        return cls(*json.loads(data))


def find_shareable(
    tensors: Mapping[str, LocalTensor],
    values: Mapping[str, Any],
    all_ranks: tuple[int, ...],
    min_replicas: int,
) -> list[Shareable]:
    """Return the tensors that at least ``min_replicas`` ranks want, as far as this rank knows."""
    found: list[Shareable] = []
    axes: dict[Layout, tuple[int, int]] = {}
    usable: dict[tuple[int, int], bool] = {}
    for name, local in tensors.items():
        layout = local.layout
        if local.is_plain or (layout is not None and _is_on_all(layout, all_ranks)):
            if len(all_ranks) >= min_replicas:
                num_replicas = len(all_ranks)
                found.append(Shareable(name=name, group="everyone", num_replicas=num_replicas))
        elif layout is not None:
            mesh = getattr(values[name], "device_mesh", None)
            if mesh is None:  # a layout beside a tensor, for which there are no groups
                continue
            axis, size = axes.get(layout) or axes.setdefault(layout, _widest_axis(layout))
            if size >= max(min_replicas, 2) and set(layout.mesh.all_ranks()) <= set(all_ranks):
                key = id(mesh), axis
                if key not in usable:
                    usable[key] = _has_group(mesh, axis)
                if usable[key]:
                    group = layout.mesh, axis
                    found.append(Shareable(name=name, group=group, num_replicas=size, mesh=mesh))
    return found


def _is_on_all(layout: Layout, all_ranks: tuple[int, ...]) -> bool:
    """Whether every rank of the load holds the whole tensor."""
    if not all(isinstance(p, Replicate) for p in layout.placements):
        return False
    return sorted(layout.mesh.all_ranks()) == sorted(all_ranks)


def _widest_axis(layout: Layout) -> tuple[int, int]:
    """Return the axis that replicates most, and how many replicas it makes."""
    sizes = [
        (size, -axis)
        for axis, (size, placement) in enumerate(
            zip(layout.mesh.shape, layout.placements, strict=True)
        )
        if isinstance(placement, Replicate)
    ]
    size, axis = max(sizes, default=(1, 0))
    return -axis, size


def _has_group(mesh: Any, axis: int) -> bool:
    """Whether the process group along an axis is there or can be made when it is needed."""
    if not isinstance(mesh, DeviceMesh) or torch.distributed.is_initialized():
        return True
    try:
        mesh.get_group(axis)  # given groups only: nothing is made without torch.distributed
    except PlacementError:
        return False
    return True


def fingerprint(
    tensors: Mapping[str, LocalTensor],
    shareable: Sequence[Shareable],
    striped: Striped,
    rest: object,
) -> str:
    """Return a hash that is equal on ranks with equal destinations, or "" if none is shared."""
    if not shareable and not striped.names:
        return ""
    meshes: dict[Mesh, int] = {}
    texts: dict[Layout, str] = {}
    told: list[Any] = [rest]
    for name, local in tensors.items():
        where = ""
        if local.layout is not None:
            where = texts.get(local.layout) or texts.setdefault(local.layout, str(local.layout))
        told.append([name, local.dtype.code, local.shape, where, local.is_plain])
    for item in shareable:
        group: Any = item.group
        if group != "everyone":
            group = [meshes.setdefault(group[0], len(meshes)), group[1]]
        told.append([item.name, group])
    for name in sorted(striped.names):
        layout = tensors[name].layout
        told.append([name, meshes.setdefault(layout.mesh, len(meshes)) if layout else None])
    told.append([mesh.to_json() for mesh in meshes])
    return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())


def may_share_memory(offers: Sequence[Offer]) -> bool:
    """Whether the ranks are on one host and as many as it takes, and none of them refuses."""
    return (
        len(offers) >= MIN_LOCAL_RANKS
        and len({offer.host for offer in offers}) == 1
        and not any(offer.asked is False for offer in offers)
    )


def why_alone(offers: Sequence[Offer], store: Store, *, in_memory: bool) -> str:
    """Return why each rank reads for itself whatever it loads; "" where that depends on it.

    ``in_memory`` says whether all of them can share memory.
    """
    first = offers[0]
    if len(offers) == 1:
        return "there is one rank only"
    if any(offer.asked is False for offer in offers):
        return "it was not wanted (read_once=False)"
    if any(offer.asked != first.asked for offer in offers):
        return "the ranks were given different values of read_once"
    num_hosts = len({offer.host for offer in offers})
    if not (first.asked or in_memory) and not limits.is_remote(store) and num_hosts == 1:
        return "all ranks are on one host, whose memory holds what one of them has read"
    return ""


def share_memory(offers: Sequence[Offer]) -> bool:
    """Whether all ranks can share the same by memory of their host."""
    return all(offer.in_memory and offer.in_memory == offers[0].in_memory for offer in offers)


def decide(offers: Sequence[Offer], store: Store) -> tuple[bool, str]:
    """Return whether the ranks read once, and why; decided on one rank for all."""
    first, in_memory = offers[0], share_memory(offers)
    might = all(offer.in_memory for offer in offers)
    alone = why_alone(offers, store, in_memory=might)
    if alone:
        return False, alone
    others = any(offer.fingerprint != first.fingerprint for offer in offers)
    if not in_memory and (might or others):
        return False, "the ranks load different tensors or layouts"
    if not (in_memory or first.fingerprint):
        needed = 2 if first.asked else MIN_REPLICAS
        return False, (
            f"no tensor is wanted by {needed} ranks that have a process group, or laid out on all "
            "ranks and read several times"
        )
    if first.asked:
        return True, "it was asked for (read_once=True)"
    if in_memory:
        return True, f"blocks would be read {first.times_in_memory:.1f} times on one host"
    reasons: list[str] = []
    if first.has_replicas:
        reasons.append(f"{MIN_REPLICAS} or more ranks want the same")
    if first.times:
        reasons.append(f"blocks would be read {first.times:.1f} times")
    num_hosts = len({offer.host for offer in offers})
    where = "from an object store" if limits.is_remote(store) else f"on {num_hosts} hosts"
    return True, f"{' and '.join(reasons)} {where}"
