"""Tensors among the inputs and outputs of a module, brought to where they must lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor, resolve_placements
from ..graphs.nodes import CAN_RECORD, NODES
from ..mesh.device_mesh import DeviceMesh
from ..mesh.torch_layouts import AnyPlacement, is_placement
from ..tensor.compilers import opaque
from ..tensor.wrapper import Wrapper

Layouts = Any
"""A placement for a tensor, None for what stays, and tuples, lists and dicts of such for those."""


def distributed(
    value: object,
    now: AnyPlacement,
    wanted: AnyPlacement,
    mesh: DeviceMesh,
    where: str,
    *,
    size: tuple[int, int] | None = None,
) -> DTensor:
    """Return a tensor with the placement ``wanted``; a plain one lies as ``now`` says.

    ``size``, a dim and the size that a plain tensor has along it on all ranks together, saves the
    ranks to exchange their sizes.
    """
    if CAN_RECORD and torch.compiler.is_dynamo_compiling():
        from ..graphs.dynamo import run_node

        return run_node("distributed", value, now, wanted, mesh, where, size)
    return _distributed(value, now, wanted, mesh, where, size)


@opaque
def _distributed(
    value: object,
    now: AnyPlacement,
    wanted: AnyPlacement,
    mesh: DeviceMesh,
    where: str,
    size: tuple[int, int] | None,
) -> DTensor:
    if not isinstance(value, Tensor):
        raise PlacementError(
            f"{where}: expected a tensor to lie as {now}, got {type(value).__name__}; None stands "
            "for what is no tensor"
        )
    if isinstance(value, Wrapper):
        tensor: Any = value
        if not tensor.device_mesh.same_ranks_as(mesh):
            raise PlacementError(
                f"{where}: a DTensor lies on mesh {tensor.device_mesh.layout_mesh}, expected "
                f"{mesh.layout_mesh}; redistribute it to that one first"
            )
    else:
        shape = None
        if size is not None:
            given = list(value.shape)
            given[size[0]] = size[1]
            shape = tuple(given)
        try:
            tensor = DTensor.from_local(value, mesh, [now], shape=shape)
        except PlacementError as error:
            raise PlacementError(
                f"{where}, a plain tensor taken to lie as {now}: {error}"
            ) from error
    try:
        target = resolve_placements([wanted], mesh, tensor.ndim)
        return tensor if tensor.placements == target else tensor.redistribute(placements=target)
    except PlacementError as error:
        raise PlacementError(f"{where}, which must lie as {wanted}: {error}") from error


NODES["distributed"] = _distributed


def on_input(module: nn.Module, bring: Callable[[Any], DTensor]) -> None:
    """Let ``bring`` have the first input of a module, by position or as ``input``, before it."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (bring(args[0]), *args[1:]), kwargs
        if "input" in kwargs:
            return args, {**kwargs, "input": bring(kwargs["input"])}
        name = type(module).__name__
        raise PlacementError(f"input of {name}: the call has none, got {sorted(kwargs)}")

    module.register_forward_pre_hook(hook, with_kwargs=True)


def require_placement(value: object, what: str) -> None:
    """Raise PlacementError for what is no placement, as a class or a text is."""
    if not is_placement(value):
        kind = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise PlacementError(
            f"{what} must be a placement, as Shard(1) or Replicate(), or None, got {kind}"
        )


def prepare(
    value: Any, now: Layouts, wanted: Layouts, mesh: DeviceMesh, where: str, *, to_local: bool
) -> Any:
    """Return a value with the tensors in it brought from placements to others, told by two trees.

    What ``now`` has None for stays as it is.
    """
    if now is None:
        return value
    if is_placement(now):
        made = distributed(value, now, wanted, mesh, where)
        return made.to_local() if to_local else made
    if isinstance(now, Mapping):
        if not isinstance(value, Mapping) or not set(now) <= set(value):
            raise _unlike(where, now, value)
        given: Mapping[Any, Any] = value
        changed = {
            key: prepare(
                given[key], layout, wanted[key], mesh, f"{where}[{key!r}]", to_local=to_local
            )
            for key, layout in now.items()
        }
        return type(given)({**given, **changed})  # pyright: ignore[reportCallIssue]
    if not isinstance(value, list | tuple) or len(value) != len(now):
        raise _unlike(where, now, value)
    kind: Any = type(value)
    items = [
        prepare(item, one, other, mesh, f"{where}[{number}]", to_local=to_local)
        for number, (item, one, other) in enumerate(zip(value, now, wanted, strict=True))
    ]
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _unlike(where: str, layouts: Layouts, value: object) -> PlacementError:
    count = f" of {len(value)}" if isinstance(value, Sequence) else ""
    side = "output" if where.startswith("output") else "input"
    return PlacementError(
        f"module {side}s and {side}_layouts should have same length! {where}: the layouts "
        f"{layouts!r} do not fit a {type(value).__name__}{count}; give one layout, or None, for "
        "each part of it"
    )


def check_pairs(now: Layouts, wanted: Layouts, what: str, others: str) -> None:
    """Raise PlacementError unless two trees have one form, but for what is None in ``now``."""
    if now is None or (is_placement(now) and is_placement(wanted)):
        return
    if isinstance(now, Mapping) and isinstance(wanted, Mapping) and set(now) == set(wanted):
        pairs = [(key, now[key], wanted[key]) for key in now]
    elif is_row(now) and is_row(wanted) and len(now) == len(wanted):
        pairs = [(n, *pair) for n, pair in enumerate(zip(now, wanted, strict=True))]
    else:
        raise PlacementError(
            f"{what} and {others} should have same length! And one form: a placement for each "
            f"tensor, None for what stays; got {now!r} and {wanted!r}"
        )
    for key, one, other in pairs:
        check_pairs(one, other, f"{what}[{key!r}]", f"{others}[{key!r}]")


def is_row(value: object) -> bool:
    """Whether a value is a tuple or a list."""
    return isinstance(value, list | tuple)
