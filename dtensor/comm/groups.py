"""Process groups of a mesh: given ones are checked, missing ones are made."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dtckpt.errors import MeshDimError, PlacementError

from ..geometry.mesh import Mesh
from ..torch_private import ask_for_group_names, warn_of_group_names

Axes = tuple[int, ...]

BackendOverride = str | Any
"""The name of a backend, its options, or a tuple of both."""
BackendOverrides = Mapping[int | str, BackendOverride] | Sequence[BackendOverride]
"""By the names or indices of mesh dims; or one for each, ``(None, None)`` for that of the job."""


def given_groups(mesh: Mesh, groups: Sequence[Any] | None, world_group: Any) -> dict[Axes, Any]:
    """Return groups by the axes that they run along; PlacementError for wrong sizes."""
    found: dict[Axes, Any] = {}
    if groups is not None:
        sizes = tuple(group.size() for group in groups)
        if sizes != mesh.shape:
            raise PlacementError(
                f"a mesh of shape {mesh.shape} needs one group per axis of these sizes, "
                f"got groups of sizes {sizes}"
            )
        found.update(((axis,), group) for axis, group in enumerate(groups))
    if world_group is not None:
        if world_group.size() != mesh.size:
            raise PlacementError(
                f"the world group of a mesh of {mesh.size} ranks has {world_group.size()}"
            )
        found.setdefault(tuple(range(mesh.ndim)), world_group)
    return found


def make_group(
    mesh: Mesh,
    axes: Axes,
    ranks_along: Callable[[Axes], tuple[int, ...]],
    backend: BackendOverride | None = None,
    *,
    keeps_order: bool = False,
) -> Any:
    """Return a new group of the ranks along ``axes``; only they need to reach this call.

    ``backend`` is another one than that of the job. The group has its ranks in ascending order, or
    with ``keeps_order`` in that of the mesh. Raises PlacementError where torch.distributed
    is not initialised.
    """
    if not dist.is_initialized():
        names = tuple(mesh.axis_names[axis] for axis in axes)
        raise PlacementError(
            f"mesh {mesh} has no process group over {names}: initialise torch.distributed, or pass "
            "groups= and world_group= to the DeviceMesh"
        )
    names = mesh.axis_names if mesh.is_named else [f"dim_{axis}" for axis in range(mesh.ndim)]
    description = "_".join(["mesh", *(names[axis] for axis in axes)])
    return _new_group(ranks_along(axes), backend, description, keeps_order=keeps_order)


def backend_overrides(mesh: Mesh, given: BackendOverrides | None) -> dict[Axes, BackendOverride]:
    """Return backends by axes; PlacementError for an axis that is not there or is named twice."""
    if given is not None and not isinstance(given, Mapping):  # a backend and options for each dim
        if len(given) != mesh.ndim:
            raise PlacementError(
                f"backend_override of mesh {mesh} needs {mesh.ndim} entries, got {len(given)}"
            )
        given = {dim: entry for dim, entry in enumerate(given) if entry != (None, None)}
    found: dict[Axes, BackendOverride] = {}
    known = {*mesh.axis_names, *range(-mesh.ndim, mesh.ndim)}
    invalid = [key for key in given or () if key not in known]
    if invalid:
        raise MeshDimError(
            f"Found invalid keys in backend_override: got {invalid}, mesh {mesh} has the dims "
            f"{mesh.axis_names}"
        )
    for key, backend in (given or {}).items():
        axes = (mesh.axis(key),)
        if axes in found:
            raise PlacementError(
                f"Found redundant dim index {axes[0]} and name {mesh.axis_names[axes[0]]} in "
                f"backend_override of mesh {mesh}: give one of them"
            )
        found[axes] = backend
    return found


def _new_group(
    ranks: tuple[int, ...],
    backend: BackendOverride | None = None,
    description: str | None = None,
    *,
    keeps_order: bool = False,
) -> Any:
    ordered = ranks if keeps_order else tuple(sorted(ranks))
    if backend is None and ordered == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    name, options = backend if isinstance(backend, tuple) else (backend, None)
    if name is not None and not isinstance(name, str):
        name, options = None, name
    order: dict[str, Any] = {} if ordered == tuple(sorted(ranks)) else {"sort_ranks": False}
    if order and not can_keep_order():
        raise PlacementError(
            f"preserve_rank_order: torch {torch.__version__} has no process groups whose ranks do "
            f"not ascend, as {ordered}; take torch 2.13 or later, or leave it out"
        )
    with _lock:
        made = _numbers.setdefault(dist.group.WORLD, {})
        number = made[ordered] = made.get(ordered, 0) + 1
    with _named(f"dtckpt {number} of {ordered}"):
        return dist.new_group(
            list(ordered),
            backend=name,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=description,
            **order,
        )


def can_keep_order() -> bool:
    """Whether torch makes process groups whose ranks do not ascend."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


_numbers: WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = WeakKeyDictionary()
"""How many groups of some ranks there are, by the job's default group: alike on all of them."""
_over: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Groups over the ranks of several meshes, by the job's default group."""
_lock = threading.Lock()


class _Name(threading.local):
    text: str = ""


_name = _Name()


@contextmanager
def _named(text: str) -> Generator[None]:
    """Have torch call the group that this thread makes by a name that is the same on all ranks."""
    if ask_for_group_names(lambda: _name.text):
        _name.text = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    else:
        warn_of_group_names()
    try:
        yield
    finally:
        _name.text = ""


def group_over(ranks: tuple[int, ...]) -> Any:
    """Return the group of these ranks, in ascending order, which is made once in a job.

    All of them have to reach the first call. Raises PlacementError where torch.distributed is not
    initialised.
    """
    if not dist.is_initialized():
        raise PlacementError(
            f"there is no process group of the ranks {list(ranks[:8])} of both meshes: initialise "
            "torch.distributed, or let one of the meshes lie within= a mesh of exactly these "
            f"{len(ranks)} ranks that has a world_group"
        )
    known = _over.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        known[ranks] = _new_group(ranks)
    return known[ranks]


def check_group_ranks(group: Any, expected: tuple[int, ...], axis_name: str) -> None:
    """Raise PlacementError where a group knows its global ranks and they are not those expected."""
    actual = ranks_of(group)
    if actual is not None and sorted(actual) != sorted(expected):
        raise PlacementError(
            f"the group of axis {axis_name!r} has ranks {actual}, but the mesh has "
            f"{list(expected)} there"
        )


def ranks_of(group: Any) -> list[int] | None:
    """Return the global rank of every group rank, or None for a group registered nowhere."""
    if not dist.is_initialized():
        return None
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return None


def name_of(group: Any) -> str:
    """Return the name of a group, the same on all of its ranks; none for one registered nowhere."""
    return "" if ranks_of(group) is None else str(group.group_name)
