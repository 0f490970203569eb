"""Specs: what a distributed tensor is, on one device mesh.

Specs are interned per mesh object: two equal specs of one mesh are one object. Comparing and
hashing them are therefore pointer operations, which the dispatch of every operator relies on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from dtckpt.errors import PlacementError

from ..comm.caches import Cache
from ..geometry.box import Box, row_major_strides
from ..geometry.layout import Layout
from ..geometry.placement import Partial, Placement, Replicate, format_placements
from .device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, strides and dtype of a global tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DTensorSpec:
    """A layout on a device mesh, with strides and dtype.

    Made by ``spec_of`` only, which returns the same object for the same values.
    """

    mesh: DeviceMesh
    layout: Layout
    tensor_meta: TensorMeta
    placements: tuple[Placement, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)
    """Element type."""
    box: Box | None = field(init=False)
    """What this rank holds, in places of dims that are dealt out (``parts``); None where the
    process has no rank or is not in the mesh."""
    local_shape: tuple[int, ...] = field(init=False)
    """Shape of this rank's local tensor; (0,) where the rank is not in the mesh."""
    is_row_major: bool = field(init=False)
    """Whether the strides are those of contiguous memory."""

    def __post_init__(self) -> None:
        here = self.mesh.get_coordinate() if self.mesh.has_rank else None
        object.__setattr__(self, "placements", self.layout.placements)
        object.__setattr__(self, "dtype", self.tensor_meta.dtype)
        box = None if here is None else self.layout.box(here)
        object.__setattr__(self, "box", box)
        object.__setattr__(self, "local_shape", (0,) if box is None else box.sizes)
        is_row_major = self.stride == row_major_strides(self.layout.shape)
        object.__setattr__(self, "is_row_major", is_row_major)

    def __deepcopy__(self, memo: object) -> DTensorSpec:
        return self

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """Global strides."""
        return self.tensor_meta.stride

    @property
    def expanded_dims(self) -> tuple[int, ...]:
        """Dims along which several elements share one place in memory."""
        if 0 in self.shape:
            return ()
        pairs = enumerate(zip(self.shape, self.stride, strict=True))
        return tuple(dim for dim, (size, stride) in pairs if size > 1 and not stride)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.tensor_meta.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh: a name of torch's."""
        return self.mesh

    @property
    def dim_map(self) -> list[int]:
        """For every tensor dim the first axis that cuts it, -1 where none does."""
        cuts = [
            [a for a, p in enumerate(self.placements) if p.is_shard(d)] for d in range(self.ndim)
        ]
        return [axes[0] if axes else -1 for axes in cuts]

    def own_box(self) -> Box:
        """Return ``box``; PlacementError where this rank is not in the mesh."""
        if self.box is None:
            raise PlacementError(f"this rank is not in mesh {self.mesh.layout_mesh} of {self}")
        return self.box

    def parts(self) -> tuple[tuple[Box, Box], ...]:
        """Return the boxes of the tensor that this rank holds, each with where it has it."""
        here = self.mesh.get_coordinate() if self.mesh.has_rank else None
        return () if here is None else self.layout.parts(here)

    def with_placements(self, placements: Sequence[Placement]) -> DTensorSpec:
        """Return the spec of the same tensor with other placements."""
        meta = self.tensor_meta
        return spec_of(self.mesh, tuple(placements), meta.shape, meta.stride, meta.dtype)

    def with_dtype(self, dtype: torch.dtype | None) -> DTensorSpec:
        """Return the spec of the same tensor in another dtype; None keeps its own."""
        if dtype is None or dtype == self.dtype:
            return self
        return spec_of(self.mesh, self.placements, self.shape, self.stride, dtype)

    def replicated(self) -> DTensorSpec:
        """Return the spec of the same tensor, whole on every rank."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    def reduced(self) -> DTensorSpec:
        """Return the spec of the same tensor with Replicate for every Partial."""
        if not self.layout.is_partial:
            return self
        return self.with_placements([Replicate() if p.is_partial() else p for p in self.placements])

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)} ({format_placements(self.placements)})"


MAX_KEPT = 4096
"""Specs per mesh that are kept although nothing may have them; the older half goes first."""

Key = tuple[tuple[Placement, ...], tuple[int, ...], tuple[int, ...], torch.dtype]


_LOCK = threading.RLock()  # signal handlers and finalizers may come in between


def spec_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return the one spec of these values; contiguous strides where ``stride`` is None.

    Raises PlacementError where the placements do not fit the mesh or the shape.
    """
    kept: Cache[Key, DTensorSpec] = mesh.cache("specs", MAX_KEPT)
    given = tuple(map(int, shape))
    strides = row_major_strides(given) if stride is None else tuple(map(int, stride))
    if dtype == torch.bool:
        placements = [_of_bools(placement) for placement in placements]
    key: Key = (tuple(placements), given, strides, dtype)
    found = kept.get(key)
    if found is not None:
        return found
    layout = Layout(mesh.layout_mesh, tuple(placements), given)
    normal: Key = (layout.placements, given, strides, dtype)
    made = DTensorSpec(mesh, layout, TensorMeta(torch.Size(given), strides, dtype))
    interned = mesh.state("specs", WeakValueDictionary[Key, DTensorSpec])
    with _LOCK:
        found = interned.setdefault(normal, made)
    kept.put(key, found)
    return found


def _of_bools(placement: Placement) -> Placement:
    """Return the reduction that a sum or product means for bools: any, and all."""
    if isinstance(placement, Partial):
        return Partial(
            {"sum": "max", "product": "min"}.get(placement.reduce_op, placement.reduce_op)
        )
    return placement


def replicated_spec(mesh: DeviceMesh, tensor: torch.Tensor) -> DTensorSpec:
    """Return the spec of a plain tensor that is equal on all ranks."""
    return spec_of(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tensor.stride(), tensor.dtype)


def contiguous_spec(spec: DTensorSpec) -> DTensorSpec:
    """Return the spec of the same tensor with contiguous strides."""
    if spec.is_row_major:
        return spec
    return spec_of(spec.mesh, spec.placements, spec.shape, None, spec.dtype)
