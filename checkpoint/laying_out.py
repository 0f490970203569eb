"""Layouts beside plain tensors: the state that says what they are parts of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from dtckpt.errors import LayoutMismatch, PlacementError

from ..dtensor.geometry.layout import Layout
from ..dtensor.geometry.mesh import Mesh
from ..dtensor.geometry.placement import Shard
from .state.names import Path, index_component, join, key_component
from .state.tree import SEQUENCES, dict_tag, is_stateful
from .tensors.announced import announces
from .tensors.local_shard import LocalShard
from .tensors.local_tensor import tensor_tag

StateT = TypeVar("StateT")


def with_layouts(
    state: StateT, layouts: Mapping[str, Layout | tuple[Any, Any]], *, rank: int | None = None
) -> StateT:
    """Return the same state with plain tensors as the local shards of layouts, by their names.

    To be given to ``save`` and ``load``, which fills the same tensors. Names are paths as in a
    checkpoint of ``state``: ``"model/w"``. A layout is a ``Layout``, which states the global shape,
    or a pair of a mesh, ours or torch's, and what lies on it: placements, ours or torch's, or an
    ``SpmdLayout`` of torchtitan. Of a pair the global shape is that of even parts: for others give
    a ``Layout``. Tensors that know where they lie, as DTensors do, and those without a layout are
    as they were; the latter count as replicated. An ``SpmdLayout`` without axes says nothing.

    ``rank`` is this process's in the ranks of meshes that do not know it themselves, by default
    that of torch.distributed. Nothing is copied or sent.

    Raises LayoutMismatch, naming the tensor, where a layout and its tensor do not fit each other,
    and for layouts of what is no tensor, of what is within an object (give its ``state_dict()``),
    and of names that the state has not: a misspelt one would leave a part to be taken for whole.
    Programs list some: torchtitan those of fused weights beside their parts. Leave these out.

    >>> from dtckpt.dtensor import Layout, Mesh, Shard
    >>> rows = Layout(Mesh((2,), ("tp",)), (Shard(0),), (7, 3))
    >>> state = with_layouts({"w": torch.zeros(3, 3), "step": 1}, {"w": rows}, rank=1)
    >>> print(state["w"].layout, state["w"].coordinate)
    [7, 3] (S(0)) on tp=2 (1,)
    """
    work = _LayingOut(dict(layouts), rank)
    laid_out = work.value(state, ())
    work.check_used()
    return laid_out


@dataclass(slots=True)
class _LayingOut:
    layouts: Mapping[str, Layout | tuple[Any, Any]]
    rank: int | None
    used: set[str] = field(default_factory=set[str])
    objects: list[str] = field(default_factory=list[str])

    def value(self, value: Any, path: Path) -> Any:
        name = join(path)
        if tensor_tag(value) is not None:
            return self.tensor(value, name)
        if name in self.layouts:
            raise LayoutMismatch(f"{name}: a layout for a {type(value).__name__}, not a tensor")
        if is_stateful(value):
            self.objects.append(f"{name}/" if name else "")
            return value
        if dict_tag(value) is not None:
            return {k: self.value(v, (*path, key_component(k))) for k, v in value.items()}
        if type(value) in SEQUENCES:
            items = [self.value(v, (*path, index_component(i))) for i, v in enumerate(value)]
            return type(value)(items)
        return value

    def tensor(self, value: Any, name: str) -> Any:
        given = self.layouts.get(name)
        if given is None:
            return value
        self.used.add(name)
        if isinstance(value, np.ndarray):
            raise LayoutMismatch(
                f"{name}: a layout for a numpy array; give torch.from_numpy(array), which has its "
                "memory"
            )
        if not isinstance(value, torch.Tensor) or announces(value):
            return value
        if hasattr(value, "device_mesh"):  # a DTensor, ours or torch's
            return value
        try:
            return self.shard(value, given)
        except PlacementError as error:
            raise LayoutMismatch(f"tensor {name!r}: {error}") from error

    def shard(self, value: torch.Tensor, given: Layout | tuple[Any, Any]) -> Any:
        if isinstance(given, Layout):
            return LocalShard(value, given, given.mesh.coordinate(self.own_rank()))
        from ..dtensor.mesh.spmd_layouts import is_spmd_layout, placements_from_spmd
        from ..dtensor.mesh.torch_layouts import placements_from_torch
        from ..dtensor.mesh.torch_mesh import mesh_from_torch

        of_job, placed = given
        mesh = of_job if isinstance(of_job, Mesh) else mesh_from_torch(of_job)
        if is_spmd_layout(placed):
            if not placed.axis_types and not placed.partition_spec:
                return value
            placements = placements_from_spmd(placed, mesh, value.ndim)
        else:
            placements = placements_from_torch(placed, mesh.shape, value.ndim)
        if isinstance(of_job, Mesh):
            coordinate = mesh.coordinate(self.own_rank())
        else:
            found = of_job.get_coordinate()
            coordinate = None if found is None else tuple(found)
        sizes = list(value.shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                sizes[placement.dim] *= mesh.shape[axis]
            elif placement.is_shard():
                raise PlacementError(
                    f"{placement} has no even parts, of which the global shape could be told; "
                    "give a Layout, which states it"
                )
        return LocalShard(value, Layout(mesh, placements, tuple(sizes)), coordinate)

    def own_rank(self) -> int:
        if self.rank is None:
            distributed = torch.distributed
            is_job = distributed.is_available() and distributed.is_initialized()
            self.rank = distributed.get_rank() if is_job else 0
        return self.rank

    def check_used(self) -> None:
        """Raise LayoutMismatch for layouts that cannot have been meant so."""
        rest = [name for name in self.layouts if name not in self.used]
        within = [name for name in rest if any(map(name.startswith, self.objects))]
        if within:
            raise LayoutMismatch(
                f"layouts of {within[:5]}, which are within an object; give its state_dict()"
            )
        if rest:
            raise LayoutMismatch(
                f"the state has no tensor {', '.join(map(repr, rest[:5]))}; layouts go by the "
                "names that tensors have in the state, as 'model/w'. Mend the name, or leave the "
                "layout out"
            )
