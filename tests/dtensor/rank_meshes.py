"""Device meshes for ranks that are threads: one real Gloo group per axis and one over all."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtckpt.dtensor import DeviceMesh, Mesh
from dtckpt.dtensor.comm.collectives import Peers, all_gather
from dtckpt.dtensor.comm.traffic import (
    EVERYWHERE,
    Collective,
    Observer,
    add_observer,
    remove_observer,
)
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.dtensor.geometry.layout import Layout
from tests.ranks import axis_groups, gloo_group, run_ranks

from .oracle import local_array

T = TypeVar("T")

_c10d: Any = dist


def run_on_mesh(
    shape: tuple[int, ...], body: Callable[[DeviceMesh], T], names: tuple[str, ...] = ()
) -> list[T]:
    """Run ``body(mesh)`` in one thread per rank of a mesh of ``shape``; results by rank."""
    store = _c10d.HashStore()

    def run(rank: int, world: dist.ProcessGroup) -> T:
        return body(rank_mesh(store, shape, rank, world, names))

    return run_ranks(math.prod(shape), run)


@contextmanager
def groups_over_several_axes() -> Generator[None]:
    """Within it meshes of threads get groups over several axes, which a job would make."""
    store = _c10d.HashStore()

    def made(
        mesh: Mesh, axes: tuple[int, ...], ranks_along: Any, backend: object, *, keeps_order: bool
    ) -> Any:
        ranks: tuple[int, ...] = ranks_along(axes)
        own = ranks_along.__self__.get_rank()
        prefix = _c10d.PrefixStore(f"{mesh}/{axes}/{ranks}", store)
        return gloo_group(prefix, ranks.index(own), len(ranks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtckpt.dtensor.mesh.axis_groups.make_group", made)
        yield


def rank_mesh(
    store: object, shape: tuple[int, ...], rank: int, world: Any, names: tuple[str, ...] = ()
) -> DeviceMesh:
    """Return one rank's mesh with its own ends of the groups."""
    mesh = Mesh(shape, names) if names else Mesh(shape)
    groups = axis_groups(store, mesh, rank)
    return DeviceMesh("cpu", mesh, groups=groups, world_group=world)


def run_on_meshes(size: int, meshes: Sequence[Mesh], body: Callable[..., T]) -> list[T]:
    """Run ``body(*meshes)`` in one thread per rank; not every rank need be in every mesh.

    Tensors go from one mesh to another over the group of all ranks.
    """
    store = _c10d.HashStore()

    def run(rank: int, world: dist.ProcessGroup) -> T:
        root = DeviceMesh("cpu", Mesh((size,)), groups=[world])
        made: list[DeviceMesh] = []
        for number, mesh in enumerate(meshes):
            own: dict[str, Any] = {"rank": rank, "within": root}
            if mesh.coordinate(rank) is not None:
                prefix = _c10d.PrefixStore(f"mesh{number}", store)
                own["groups"] = axis_groups(prefix, mesh, rank)
            made.append(DeviceMesh("cpu", mesh, **own))
        return body(*made)

    return run_ranks(size, run)


def gather_alike(tensor: torch.Tensor, peers: Peers) -> list[torch.Tensor]:
    """An all-gather of tensors that have one shape on all ranks."""
    return all_gather(tensor, [tuple(tensor.shape)] * peers.size, peers)


class _Listed(Observer):
    def __init__(self) -> None:
        self.seen: list[Collective] = []

    def before(self, collective: Collective) -> None:
        self.seen.append(collective)


@contextmanager
def collectives(*, of_all_ranks: bool = False) -> Generator[list[Collective]]:
    """Collect the collectives that this rank issues, or all ranks of this process."""
    observer = _Listed()
    thread = EVERYWHERE if of_all_ranks else None
    add_observer(observer, thread)
    try:
        yield observer.seen
    finally:
        remove_observer(observer, thread)


def scattered(whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
    """Return ``whole`` laid out by cutting it here, without any communication.

    A Partial axis holds terms that differ and reduce to the values.
    """
    layout = Layout(mesh.layout_mesh, tuple(placements), tuple(whole.shape))
    here = mesh.get_coordinate()
    if here is None:
        nothing = torch.empty(0, dtype=whole.dtype)
        return DTensor.from_local(nothing, mesh, placements, shape=whole.shape)
    local = torch.from_numpy(local_array(layout, here, whole.detach().numpy()).copy())
    for axis, placement in enumerate(layout.placements):
        op = getattr(placement, "reduce_op", None)
        if op is not None:
            local = _term(local, op, here[axis], mesh.shape[axis])
    return DTensor.from_local(local, mesh, placements, shape=whole.shape)


def _term(local: torch.Tensor, op: str, index: int, count: int) -> torch.Tensor:
    if count == 1:
        return local
    if op == "sum":  # 1, 2, 3, ... and what is left
        return local - count * (count - 1) // 2 if index == 0 else torch.full_like(local, index)
    if op == "avg":
        return local + (index - (count - 1) / 2)
    if op == "product":
        return local / 2 ** (count - 1) if index == 0 else torch.full_like(local, 2)
    step = index if op == "min" else -index
    return local + step


def expected_local(
    whole: torch.Tensor, layout: Layout, here: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return what a coordinate holds by the oracle."""
    return local_array(layout, here, whole.detach().numpy())


def assert_holds(tensor: torch.Tensor, whole: torch.Tensor, **tolerance: Any) -> None:
    """Assert that a distributed tensor is ``whole``: shape, dtype, and this rank's values."""
    assert isinstance(tensor, DTensor), type(tensor)
    assert tensor.shape == whole.shape
    assert tensor.dtype == whole.dtype
    here = tensor.device_mesh.get_coordinate()
    if here is None:
        assert tuple(tensor.to_local().shape) == (0,)
        return
    assert tuple(tensor.to_local().shape) == tensor.global_layout.box(here).sizes
    if tensor.global_layout.is_partial:
        torch.testing.assert_close(tensor.full_tensor(), whole, **tolerance)
    else:
        expected = torch.from_numpy(expected_local(whole, tensor.global_layout, here).copy())
        torch.testing.assert_close(tensor.to_local().detach(), expected, **tolerance)
