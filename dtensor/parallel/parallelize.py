"""``parallelize_module``: styles for the parts of a model, by name."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import AnyMesh
from ..geometry.layout import Layout
from ..geometry.placement import Placement, Replicate, Shard, format_placements
from ..mesh.device_mesh import DeviceMesh
from ..mesh.resolving import resolve_mesh
from ..modules import keep_tied, slots
from ..tensor.compilers import opaque
from ..tensor.local_parts import require_plain
from ..tensor.wrapper import Wrapper
from .base_style import ParallelStyle, layout_on, lies_already, tensor_of
from .heads import require_groups
from .linear import ColwiseParallel

Plan = ParallelStyle | Mapping[str, ParallelStyle]


@opaque
def parallelize_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    mesh_dim: str | None = None,
    strict: bool = True,
) -> nn.Module:
    """Treat a module, or parts of it, with parallel styles, in place; return it.

    ``parallelize_plan`` is a style for ``module`` itself, or styles by the names of parts:
    ``{"layers.*.wq": ColwiseParallel()}``. ``*``, ``?`` and ``[...]`` stand for characters of one
    name between two dots, ``""`` for ``module`` itself. Where several names match a part, their
    styles are applied in the order of the plan. ``mesh_dim`` names the axis of ``device_mesh``
    along which to work, if that has several.

    Parameters get the values of the rank ``src_data_rank`` along the axis; with None each rank
    has the whole already and keeps its part. Tied parameters stay tied, also where a name of the
    plan is for one of them only. Parameters on the meta device stay there.

    Raises PlacementError before anything is changed or sent: for a mesh of several axes, a name
    that matches nothing (unless ``strict`` is false), a module that a style is not for, a tensor
    for which two styles want different placements.
    """
    mesh = _one_axis(resolve_mesh(device_mesh), mesh_dim)
    if parallelize_plan is None:
        warnings.warn("parallelize_module: no parallelize_plan, nothing is done", stacklevel=2)
        return module
    steps = _steps(module, parallelize_plan, strict=strict)
    _check(mesh, steps)
    tied = _tied(module)
    for step in steps:
        step.style.src_data_rank = src_data_rank
        made = step.style._apply(step.module, mesh)  # pyright: ignore[reportPrivateUsage]
        keep_tied("parallelize_module", tied)
        if made is not step.module:
            module = _with_module(module, step.module, made)
    return module


def _with_module(root: nn.Module, module: nn.Module, made: nn.Module) -> nn.Module:
    """Put a module in the place of another one, under all the names of that; return the root."""
    if module is root:
        return made
    for name, one in [*root.named_modules(remove_duplicate=False)]:
        if one is module:
            root.set_submodule(name, made)
    return root


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of the model and its style."""

    name: str
    module: nn.Module
    style: ParallelStyle


def _one_axis(mesh: DeviceMesh, mesh_dim: str | None) -> DeviceMesh:
    if mesh_dim is not None:
        if not isinstance(mesh_dim, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError(
                f"parallelize_module: mesh_dim is the name of an axis of {mesh.layout_mesh}, got "
                f"{mesh_dim!r}"
            )
        return mesh[mesh_dim]
    if mesh.ndim != 1:
        names = mesh.layout_mesh.axis_names
        raise PlacementError(
            f"parallelize_module works along one axis, mesh {mesh.layout_mesh} has {mesh.ndim}: "
            f"pass mesh_dim= (one of {', '.join(names)}), or a part of the mesh: "
            f"mesh[{names[-1]!r}]"
        )
    return mesh


def _steps(module: nn.Module, plan: Plan, *, strict: bool) -> list[_Step]:
    """Return what to do, in order."""
    if not isinstance(plan, Mapping | ParallelStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlacementError(
            "parallelize_module: the plan must be a style, or styles by the names of parts, got a "
            f"{type(plan).__name__}"
        )
    named: dict[str, ParallelStyle] = dict(plan) if isinstance(plan, Mapping) else {"": plan}
    modules = dict(module.named_modules(remove_duplicate=False))
    steps: list[_Step] = []
    for pattern, style in named.items():
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError(
                f"parallelize_module: the plan goes by the names of parts, got {pattern!r}; a part "
                f"of a Sequential is called {str(pattern)!r}"
            )
        if not isinstance(style, ParallelStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
            given: Any = style
            is_class = isinstance(given, type)
            kind: Any = given if is_class else type(given)
            got = f"{'the class' if is_class else 'a'} {kind.__name__} of {kind.__module__}"
            raise PlacementError(
                f"parallelize_module: the style of {pattern!r} is {got}, expected a ParallelStyle "
                "of dtckpt.dtensor.parallel, as ColwiseParallel()"
            )
        found = list(_matching(pattern, modules))
        if not found and strict:
            raise PlacementError(
                f"parallelize_module: no part of a {type(module).__name__} is called {pattern!r}; "
                f"there are {_some(modules)} (strict=False leaves such names out)"
            )
        once: dict[int, _Step] = {}  # a module may stand under several names
        for name in found:
            once.setdefault(id(modules[name]), _Step(name, modules[name], style))
        steps += once.values()
    return steps


def _matching(pattern: str, names: Mapping[str, object]) -> Iterator[str]:
    parts = pattern.split(".")
    for name in names:
        own = name.split(".")
        if bool(name) is not bool(pattern) or len(own) != len(parts):
            continue
        if all(map(fnmatchcase, own, parts)):
            yield name


def _some(names: Mapping[str, object]) -> str:
    found = [repr(name) for name in names if name]
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def _tied(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the places of plain tensors that stand at several."""
    every = [slot for slot in slots(module) if not isinstance(slot[2], Wrapper)]
    count = Counter(id(tensor) for _, _, tensor in every)
    return [slot for slot in every if count[id(slot[2])] > 1]


def _check(mesh: DeviceMesh, steps: list[_Step]) -> None:
    """Raise PlacementError unless the styles fit the modules, and each other."""
    wanted: dict[int, tuple[str, Layout]] = {}
    for step in steps:
        where = f"{step.name}." if step.name else ""
        try:
            placements = step.style.placements(step.module, mesh)
            lies = step.style.mesh_of(mesh) if placements else mesh
            layouts = {
                own: layout_on(lies, placement, tensor)
                for own, placement in placements.items()
                if (tensor := tensor_of(step.module, own)) is not None
            }
        except PlacementError as error:
            raise PlacementError(f"{step.name or 'the module'}: {error}") from error
        for own, layout in layouts.items():
            name, tensor = where + own, getattr(step.module, own)
            other, before = wanted.setdefault(id(tensor), (name, layout))
            if layout != before:
                raise PlacementError(
                    f"parallelize_module: {name!r} and {other!r} are one tensor, for which the "
                    f"plan wants {format_placements(layout.placements)} and "
                    f"{format_placements(before.placements)}; give both styles that agree, as "
                    "RowwiseParallel for an embedding and ColwiseParallel for its head"
                )
            if not lies_already(name, tensor, lies, layout):
                require_plain(f"parallelize_module of {name!r}", tensor)
    beside: dict[str, dict[str, int]] = {}
    for step in steps:
        if isinstance(step.style, ColwiseParallel) and step.style.heads is not None:
            beside.setdefault(step.name.rpartition(".")[0], {})[step.name] = step.style.heads
    for numbers in beside.values():
        require_groups(numbers, mesh)


def placement_rules(module: nn.Module, prefix: str = "model") -> str:
    """Return how the distributed tensors of a module lie, as ``dtckpt reshard`` takes it.

    One rule for each name in the module's state dict that is a DTensor, under ``prefix`` as in
    a checkpoint of ``{prefix: module}``: ``model/wq.weight=S(0)``. All must lie on one mesh, or
    on one axis of ranks that is an axis of heads and one of copies for some; the rules are for
    these two then.

    Raises PlacementError where they do not.

    >>> from dtckpt.dtensor import init_device_mesh
    >>> from dtckpt.dtensor.parallel import ColwiseParallel
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> model = parallelize_module(nn.Linear(4, 8), mesh, ColwiseParallel())
    >>> placement_rules(model)
    'model/weight=S(0); model/bias=S(0)'
    """
    tensors = {n: t for n, t in module.state_dict().items() if isinstance(t, Wrapper)}
    meshes = [tensor.spec.mesh for tensor in tensors.values()]
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    rules: list[str] = []
    for name, tensor in tensors.items():
        placements = None if mesh is None else _on_mesh(tensor, mesh)
        if mesh is None or placements is None:
            raise PlacementError(
                f"{name!r} lies on mesh {tensor.spec.mesh.layout_mesh} and others on "
                f"{mesh and mesh.layout_mesh}; a checkpoint is resharded to one mesh"
            )
        rules.append(f"{prefix}/{name}={format_placements(placements)}")
    return "; ".join(rules)


def _on_mesh(tensor: Wrapper, mesh: DeviceMesh) -> tuple[Placement, ...] | None:
    """Return how a tensor lies on a mesh of the same ranks, which may have an axis as several."""
    spec = tensor.spec
    if mesh.same_ranks_as(spec.mesh):
        return spec.placements
    if spec.mesh.ndim > 1 or mesh.layout_mesh.all_ranks() != spec.mesh.layout_mesh.all_ranks():
        return None
    if not isinstance(spec.placements[0], Shard | Replicate):
        return None
    found = spec.placements * mesh.ndim
    layout = Layout(mesh.layout_mesh, found, tuple(spec.shape))
    held = [layout.held_by(rank) for rank in layout.all_ranks()]
    return found if held == [spec.layout.held_by(rank) for rank in layout.all_ranks()] else None
