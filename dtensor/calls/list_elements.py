"""What an operator on lists does at one place of them.

The elements of one list may lie on several meshes, and plain tensors may stand among them: only
those at the same place must fit together. A tensor that all elements share is used whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..geometry.placement import Replicate
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec, replicated_spec, spec_of
from ..ops.engine.choice import Choice
from ..ops.engine.primitives import Move
from ..ops.engine.table import OpCall
from ..tensor.schemas import Op
from ..tensor.wrapper import Wrapper
from .binding import Bound, spec_on
from .metas import Metas
from .numbers import require_here, require_known


@dataclass(frozen=True, slots=True)
class Element:
    """One place of the lists of a call."""

    members: tuple[int, ...]
    """Which tensors of the call stand there, without the shared ones."""
    call: OpCall | None
    """What is done to them; None where all are plain."""
    shared: tuple[int, ...]
    """Which inputs of ``call`` all elements share."""

    def choose(self, choose: Callable[[OpCall], Choice | None]) -> Choice | None:
        """Return a choice that uses what is shared whole; other inputs are reduced for it."""
        if self.call is None:
            return None
        choice = choose(self.call)
        if choice is None or all(_is_whole(choice.inputs[i]) for i in self.shared):
            return choice
        args = [a.reduced() if isinstance(a, DTensorSpec) else a for a in self.call.args]
        specs = tuple(spec.reduced() for spec in self.call.specs)
        return choose(replace(self.call, args=tuple(args), specs=specs))

    def inputs(self, choice: Choice) -> list[Move]:
        """Return the members, how they lie on the mesh of the element, and what they become."""
        call_specs = () if self.call is None else self.call.specs
        pairs = enumerate(zip(call_specs, choice.inputs, strict=True))
        kept = [pair for i, pair in pairs if i not in self.shared]
        return [(member, *pair) for member, pair in zip(self.members, kept, strict=True)]


def elements(bound: Bound, functional: Op, metas: Metas) -> list[Element]:
    """Return the elements of a call in order.

    Raises PlacementError where tensors of one place lie on different meshes.
    """
    op, args = bound.call.op, bound.call.args
    numbered, _ = bound.call.replaced(range(len(bound.leaves)))
    places: list[Element] = []
    for index, meta in enumerate(metas):
        pairs = zip(numbered, args, strict=True)
        members = tuple(n[index] for n, arg in pairs if _has_tensor(arg, index))
        leaves = [bound.leaves[member] for member in members]
        mesh = next((leaf.spec.mesh for leaf in leaves if isinstance(leaf, Wrapper)), None)
        _check_shared(op, args, mesh)
        if mesh is None:
            places.append(Element(members, None, ()))
            continue
        specs = iter(
            [
                spec_on(mesh, leaf, k, op, leaves)
                if isinstance(leaf, Wrapper)
                else replicated_spec(mesh, leaf)
                for k, leaf in enumerate(leaves)
            ]
        )
        call_args = [next(specs) if _has_tensor(a, index) else _at(mesh, a, index) for a in args]
        call = OpCall(
            op=functional,
            args=tuple(call_args),
            kwargs=bound.call.kwargs,
            specs=tuple(a for a in call_args if isinstance(a, DTensorSpec)),
            outputs=(meta,),
        )
        tensors = [a for a in args if isinstance(a, Tensor) or _has_tensor(a, index)]
        shared = tuple(k for k, a in enumerate(tensors) if isinstance(a, Tensor))
        places.append(Element(members, call, shared))
    return places


def shared_moves(bound: Bound) -> list[Move]:
    """Return the moves that make whole the tensors that all elements share."""
    numbered, _ = bound.call.replaced(range(len(bound.leaves)))
    pairs = zip(numbered, bound.call.args, strict=True)
    found = [n for n, arg in pairs if isinstance(arg, Tensor)]
    specs = [(n, bound.specs[n]) for n in found]
    return [(n, spec, spec.replicated()) for n, spec in specs if not _is_whole(spec)]


def _check_shared(op: Op, args: tuple[Any, ...], mesh: DeviceMesh | None) -> None:
    for arg in args:
        if isinstance(arg, Wrapper):
            if mesh is None:
                require_here(arg, op)
            else:
                require_known(arg.spec.mesh, mesh, op)


def _has_tensor(arg: Any, index: int) -> bool:
    return isinstance(arg, list | tuple) and isinstance(arg[index], Tensor)


def _at(mesh: DeviceMesh, arg: Any, index: int) -> Any:
    """Return what an argument is for one element: a shared tensor is a number to it."""
    if isinstance(arg, Tensor):
        return spec_of(mesh, (Replicate(),) * mesh.ndim, (), (), arg.dtype)
    return arg[index] if isinstance(arg, list | tuple) else arg


def _is_whole(spec: DTensorSpec) -> bool:
    return all(p.is_replicate() for p in spec.placements)
