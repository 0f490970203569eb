"""Meshes made of a mesh: along some of its axes, with several of them as one, with one as several.

They share the process groups of the mesh that they were taken from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import MeshDimError, PlacementError

from ..comm.groups import Axes, BackendOverride
from ..geometry.mesh import Mesh
from .axis_groups import MeshGroups, Parts

T = TypeVar("T", bound="SubMeshes")

RECIPES = ("_taken", "unflatten")
"""The methods that make a mesh of its parent."""


class SubMeshes(MeshGroups):
    """What is taken from a mesh; a base of ``DeviceMesh``."""

    _like: Callable[[Mesh], Self]
    """Makes a mesh of other ranks, of which this process is as in this one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._recipe: tuple[str, tuple[Any, ...]] = ("", ())
        """One of `RECIPES`, and its arguments."""
        self._children: dict[object, Self] = {}
        self._joined: dict[str, Axes] = {}
        """Axes that were made one, by the name of that."""

    @property
    def root(self) -> Self:
        """The mesh that this one was taken from, perhaps in steps; itself where it was not."""
        return self if self._parent is None else self._parent[0].root

    def __getitem__(self, names: str | tuple[str, ...]) -> Self:
        """Return the mesh along the named axes through this rank, in the order given.

        On the mesh that it was taken from, ``flatten`` leaves a name that counts here, too.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        known = self._joined
        if not self.layout_mesh.is_named and not {*self.layout_mesh.axis_names, *known} >= {
            *wanted
        }:
            raise MeshDimError(
                f"Cannot slice a DeviceMesh without mesh_dim_names! The dims of {self.layout_mesh} "
                f"are called {self.layout_mesh.axis_names}, got {names!r}"
            )
        parts = tuple(known.get(name) or (self.layout_mesh.axis(name),) for name in wanted)
        return self._taken(parts, wanted)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, or of coordinates along one dim or a flattened one."""
        joined = self._joined_mesh(mesh_dim)
        return super().size(mesh_dim) if joined is None else joined.size()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's index along a dim or a flattened one; 1-d meshes need not name it."""
        joined = self._joined_mesh(mesh_dim)
        return super().get_local_rank(mesh_dim) if joined is None else joined.get_local_rank()

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the process group along a dim or a flattened one; 1-d meshes need not name it."""
        joined = self._joined_mesh(mesh_dim)
        return super().get_group(mesh_dim) if joined is None else joined.get_group()

    def _joined_mesh(self, mesh_dim: int | str | None) -> Self | None:
        """Return the mesh that was flattened under a name; None where the name is no such one."""
        if not isinstance(mesh_dim, str) or mesh_dim in self.layout_mesh.axis_names:
            return None
        base, _ = self._base()
        return base[mesh_dim] if mesh_dim in base._joined else None

    def flatten(
        self, mesh_dim_name: str | None = None, backend_override: BackendOverride | None = None
    ) -> Self:
        """Return the 1-d mesh of all ranks in row-major order.

        The mesh that this one was taken from knows it by its name then: ``mesh["dp_cp"]``.
        ``backend_override`` is the backend of its process group, its options, or both in a tuple.
        """
        name = mesh_dim_name or "_".join(self.layout_mesh.axis_names)
        if self.layout_mesh.axis_names == (name,):
            return self
        base, parts = self._base()
        axes = tuple(itertools.chain.from_iterable(parts))
        if name in base.layout_mesh.axis_names or base._joined.get(name, axes) != axes:
            raise PlacementError(
                f"mesh {base.layout_mesh} has other ranks under the name {name!r}: flatten to "
                "another name"
            )
        base._joined[name] = axes
        made = base._taken((axes,), (name,))
        if backend_override is not None:
            base._override(tuple(sorted(axes)), backend_override)
        return made

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, BackendOverride] | None = None,
    ) -> Self:
        """Return the mesh of the same ranks in which one axis is several, the last one fastest.

        Of a mesh that was taken from another by its names it is a part of that one with the same
        axis as several, so that ``concat`` puts it beside other parts. ``backend_override`` has the
        backends of the groups along the new axes, as in ``init_device_mesh``.
        """
        axis, sizes = self.layout_mesh.axis(dim), tuple(mesh_sizes)
        base, parts = self._base()
        if base is not self and len(parts[axis]) == 1:
            names = self.layout_mesh.split(axis, sizes, tuple(mesh_dim_names)).axis_names
            (split,) = parts[axis]
            whole = base.unflatten(split, sizes, mesh_dim_names, backend_override)
            taken = whole._refined(base, parts) or ()
            apart = [
                [(new,) for new in part] if i == axis else [part] for i, part in enumerate(taken)
            ]
            return whole._taken(tuple(itertools.chain.from_iterable(apart)), names)
        mesh = self.layout_mesh.split(axis, sizes, tuple(mesh_dim_names))
        parts = tuple((old,) for old in range(self.ndim) for _ in (sizes if old == axis else (0,)))
        made = self._derived(mesh, parts, ("unflatten", (axis, sizes, tuple(mesh_dim_names))))
        inner = Mesh(sizes, tuple(mesh_dim_names))
        for new, backend in (backend_override or {}).items():
            made._override((axis + inner.axis(new),), backend)
        return made

    @staticmethod
    def concat(meshes: Sequence[T]) -> T:
        """Return the mesh along all axes of some meshes that were taken from one, in their order.

        Some may be taken from it with an axis as several. Raises PlacementError where they are of
        several meshes, or have axes in common.
        """
        found = [mesh._base() for mesh in meshes]
        names = tuple(name for mesh in meshes for name in mesh.layout_mesh.axis_names)
        for finest, _ in found:
            refined = [finest._refined(base, parts) for base, parts in found]
            if None not in refined:
                return finest._taken(tuple(p for parts in refined for p in parts or ()), names)
        raise PlacementError(
            f"concat takes meshes that were taken from one by their names, got {list(meshes)}"
        )

    def _taken(self, parts: Parts, names: tuple[str, ...]) -> Self:
        """Return the mesh through this rank along ``parts``, each of them one axis."""
        mesh = self.layout_mesh
        if names == mesh.axis_names and parts == tuple((axis,) for axis in range(mesh.ndim)):
            return self
        axes = tuple(itertools.chain.from_iterable(parts))
        if len(set(axes)) < len(axes):
            raise PlacementError(f"{names} of mesh {mesh} have axes in common")
        everywhere = len(axes) == mesh.ndim
        row = mesh.submesh(axes, (0,) * mesh.ndim if everywhere else self._here())
        ends = list(itertools.accumulate(map(len, parts)))
        own = tuple(tuple(range(end - len(p), end)) for end, p in zip(ends, parts, strict=True))
        return self._derived(row.joined(own, names), parts, ("_taken", (parts, names)))

    def _base(self) -> tuple[Self, Parts]:
        """Return the mesh that has this one's axes as they are, and which of its those are."""
        if self._parent is None or self._recipe[0] == "unflatten":
            return self, tuple((axis,) for axis in range(self.ndim))
        parent, parts = self._parent
        base, above = parent._base()
        return base, tuple(tuple(a for axis in part for a in above[axis]) for part in parts)

    def _refined(self, base: SubMeshes, parts: Parts) -> Parts | None:
        """Return parts of a mesh in this one, in which its axes may be several; None for others."""
        if base is self:
            return parts
        if self._parent is None or self._recipe[0] != "unflatten":
            return None
        coarser, olds = self._parent
        above = coarser._refined(base, parts)
        if above is None:
            return None
        return tuple(
            tuple(new for axis in part for new, (old,) in enumerate(olds) if old == axis)
            for part in above
        )

    def _derived(self, mesh: Mesh, parts: Parts, recipe: tuple[str, tuple[Any, ...]]) -> Self:
        key = (parts, mesh.shape, mesh.axis_names)
        with self._lock:
            if key not in self._children:
                child = self._like(mesh)
                child._parent, child._recipe = (self, parts), recipe
                self._children[key] = child
            return self._children[key]

    # What torch calls these.

    @property
    def _root_mesh(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self._parent is None else self.root

    def _get_root_mesh(self) -> Self:
        return self.root

    _flatten = flatten
    _unflatten = unflatten  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def _concatenate(device_mesh_list: list[Any]) -> Any:
        if all(isinstance(mesh, SubMeshes) for mesh in device_mesh_list):
            return SubMeshes.concat(device_mesh_list)
        return TorchDeviceMesh._concatenate(device_mesh_list)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[Any]:
        axis = self.layout_mesh.axis(mesh_dim_name)
        rows = [c for c in self.layout_mesh.coordinates() if c[axis] == 0]
        own = self[mesh_dim_name]
        found: list[Any] = []
        for at in rows:
            row = self.layout_mesh.submesh((axis,), at)
            is_own = row == own.layout_mesh
            found.append(own if is_own else self._like(row))
        return found
