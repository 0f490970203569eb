"""``local_map``: a function of plain tensors, run on what each rank holds of distributed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, overload

from torch import Tensor

from dtckpt.errors import PlacementError, UnsupportedOp

from ..dtensor import AnyMesh, DTensor, redistribute_many, resolve_placements
from ..geometry.placement import Placement, format_placements
from ..mesh.device_mesh import DeviceMesh
from ..mesh.resolving import resolve_mesh
from ..mesh.torch_layouts import AnyPlacement, is_placement
from ..tensor.compilers import opaque
from ..tensor.local_parts import check_parts, require_plain
from ..tensor.trees import flatten_tree
from ..tensor.wrapper import Wrapper

PlacementType = Sequence[AnyPlacement] | None
"""The placements of one tensor; None for what is no tensor, or for a tensor that may lie anyhow."""

InputPlacements = Sequence[PlacementType] | None
OutputPlacements = PlacementType | Sequence[PlacementType]

_P = ParamSpec("_P")


@overload
def local_map(
    func: Callable[_P, Any],
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: AnyMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    run_check: bool = False,
    spmd_types: bool = False,
) -> Callable[_P, Any]: ...


@overload
def local_map(
    func: None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: AnyMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    run_check: bool = False,
    spmd_types: bool = False,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: AnyMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    run_check: bool = False,
    spmd_types: bool = False,
) -> Callable[..., Any]:
    """Return ``func`` as a function of DTensors: it runs on their local tensors; differentiable.

    Without ``func`` this is a decorator.

    ``out_placements`` say how the results lie. One sequence of placements is for a single result,
    and a sequence of such sequences for several, one each, in the order in which they stand in
    tuples, lists and dicts. None stands for a result that is no tensor, or for a tensor that stays
    plain. Sizes of sharded dims are summed over the ranks, which exchange the local shapes once
    for each such result.

    ``in_placements`` are those that DTensors must have: one entry for each argument, whatever that
    is, keyword arguments last, or one for each tensor among them. None is an argument that may lie
    anyhow, as all may without ``in_placements``. Plain tensors are passed as they are.
    A DTensor that lies otherwise is an error, or with ``redistribute_inputs`` redistributed first,
    all such by common collectives. ``in_grad_placements``, counted alike, tell how the gradients
    of the local tensors lie, where not as the tensors themselves with Partial as Replicate.

    With ``run_check`` results that are claimed to be replicated are compared between the ranks, at
    every call, and the shapes of all; without it that is up to ``func``. ``spmd_types`` of torch
    2.14, which has the package of that name check ``func``, is UnsupportedOp where it is true.

    Results lie on ``device_mesh``, or else on the mesh of all DTensors, which must be one. A call
    without any DTensor returns what ``func`` does.

    Raises PlacementError, before ``func`` runs, for DTensors on several meshes where it is not
    told on which the results lie, or with other placements, for those of torch, for placements that
    do not fit, and on ranks outside of a mesh; and after it where results and ``out_placements`` do
    not go together.

    >>> import torch
    >>> from dtckpt.dtensor import Partial, Shard, distribute_tensor, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> product = local_map(torch.mm, [Partial()], in_placements=([Shard(1)], [Shard(0)]))
    >>> rows = distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)])
    >>> product(rows, distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])).placements
    (Partial(reduce_op='sum'),)
    """
    if spmd_types:
        raise UnsupportedOp(
            "local_map(spmd_types=True): types of local tensors are not followed through func; "
            "run_check=True compares what is claimed of the results"
        )
    mesh = None if device_mesh is None else resolve_mesh(device_mesh)

    def mapped(func: Callable[..., Any]) -> Callable[..., Any]:
        mapping = _LocalMap(
            func=func,
            name=getattr(func, "__name__", type(func).__name__),
            outputs=out_placements,
            inputs=in_placements,
            gradients=in_grad_placements,
            mesh=mesh,
            redistributes=redistribute_inputs,
            checks=run_check,
        )

        @opaque
        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            return mapping(args, kwargs)

        return run

    return mapped if func is None else mapped(func)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalMap:
    """A function, and how what goes in and comes out lies."""

    func: Callable[..., Any]
    name: str
    outputs: OutputPlacements
    inputs: InputPlacements
    gradients: InputPlacements
    mesh: DeviceMesh | None
    redistributes: bool
    checks: bool

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, rebuild = flatten_tree((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Wrapper)]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, Wrapper):
                require_plain(f"local_map({self.name})", leaf)
        if not tensors:
            return self.func(*args, **kwargs)
        mesh = self._mesh_of(tensors)
        wanted = self._for_inputs("in_placements", self.inputs, leaves)
        gradients = self._for_inputs("in_grad_placements", self.gradients, leaves)
        laid_out = iter(self._laid_out(tensors, wanted))
        grads = iter(gradients)
        local = [
            next(laid_out).to_local(grad_placements=next(grads))
            if isinstance(leaf, Wrapper)
            else leaf
            for leaf in leaves
        ]
        local_args, local_kwargs = rebuild(local)
        return self._wrapped(self.func(*local_args, **local_kwargs), mesh)

    def _mesh_of(self, tensors: Sequence[Wrapper]) -> DeviceMesh:
        meshes = [tensor.spec.mesh for tensor in tensors]
        if self.mesh is not None:
            meshes.insert(0, self.mesh)
        first = meshes[0]
        for mesh in meshes:
            if self.mesh is None and not mesh.same_ranks_as(first):
                raise PlacementError(
                    f"local_map({self.name}): a DTensor lies on mesh {mesh.layout_mesh}, the first "
                    f"on {first.layout_mesh}; redistribute it to one mesh, or say device_mesh=, on "
                    "which the results lie"
                )
            if mesh.get_coordinate() is None:
                raise PlacementError(
                    f"local_map({self.name}): rank {mesh.get_rank()} is not in mesh "
                    f"{mesh.layout_mesh} and has no local tensors; call it on ranks of it only"
                )
        return first

    def _for_inputs(
        self, what: str, given: InputPlacements, leaves: Sequence[Any]
    ) -> list[tuple[Placement, ...] | None]:
        """Return the entries for the DTensors among the arguments."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if given is None:
            return [None for leaf in leaves if isinstance(leaf, Wrapper)]
        if len(given) not in (len(leaves), len(tensors)):
            raise PlacementError(
                f"local_map({self.name}): {what} has {len(given)} entries for {len(leaves)} "
                f"arguments, {len(tensors)} of them tensors; give one for each of either"
            )
        counted = leaves if len(given) == len(leaves) else tensors
        found: list[tuple[Placement, ...] | None] = []
        for number, (leaf, entry) in enumerate(zip(counted, given, strict=True)):
            if isinstance(leaf, Wrapper):
                own = leaf.spec.mesh
                found.append(None if entry is None else resolve_placements(entry, own, leaf.ndim))
            elif entry is not None and not isinstance(leaf, Tensor):
                raise PlacementError(
                    f"local_map({self.name}): {what}[{number}] is {entry!r} for an argument of "
                    f"type {type(leaf).__name__}; None stands for what is no tensor"
                )
        return found

    def _laid_out(
        self, tensors: Sequence[Any], wanted: Sequence[tuple[Placement, ...] | None]
    ) -> list[DTensor]:
        """Return the DTensors with the placements that they must have."""
        found = list(tensors)
        moved: list[int] = []
        for number, (tensor, target) in enumerate(zip(tensors, wanted, strict=True)):
            if target is None or tensor.spec.with_placements(target) == tensor.spec:
                continue
            if not self.redistributes:
                raise PlacementError(
                    f"local_map({self.name}): DTensor {number} has placements "
                    f"({format_placements(tensor.placements)}), expected "
                    f"({format_placements(target)}); redistribute it, or pass "
                    "redistribute_inputs=True"
                )
            moved.append(number)
        if moved:
            targets: Any = [wanted[number] for number in moved]
            given = [tensors[number] for number in moved]
            for number, tensor in zip(moved, redistribute_many(given, None, targets), strict=True):
                found[number] = tensor
        return found

    def _wrapped(self, result: Any, mesh: DeviceMesh) -> Any:
        """Return the result with DTensors in the place of its tensors."""
        leaves, rebuild = flatten_tree(result)
        entries = list(self._for_outputs(leaves))
        for number, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
            if isinstance(leaf, Tensor) or entry is None:
                continue
            raise PlacementError(
                f"local_map({self.name}): result {number} of type {type(leaf).__name__} is no "
                f"tensor and cannot have the placements {entry!r}; give None for it"
            )
        return rebuild(
            [
                leaf if entry is None else self._distributed(leaf, mesh, entry)
                for leaf, entry in zip(leaves, entries, strict=True)
            ]
        )

    def _distributed(self, leaf: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
        made = DTensor.from_local(leaf, mesh, placements)
        if self.checks:
            check_parts(made.local.detach(), made.spec)
        return made

    def _for_outputs(self, leaves: Sequence[Any]) -> Iterator[PlacementType]:
        """Yield the placements of each result."""
        given = self.outputs
        entries: list[Any] = [given]
        if given and not all(map(is_placement, given)):
            entries = list(given)
        if len(entries) != len(leaves):
            raise PlacementError(
                f"local_map({self.name}): out_placements are for {len(entries)} results, but "
                f"there are {len(leaves)}; give one sequence of placements, or None, for each"
            )
        yield from entries
