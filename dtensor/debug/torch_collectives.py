"""Collectives that others issue by torch's operators, told in the same terms as the library's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..comm.groups import ranks_of
from ..comm.traffic import Collective
from ..torch_private import group_named, schema_of
from .comm_counts import kind_of

_c10d: Any = dist
"""torch's stubs leave out what groups are underneath."""

_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensors")
_OUTPUTS = ("output", "outputs", "output_tensor", "output_tensors", "out")
_ROOTS = ("root_rank", "src")


def collective_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Collective | None:
    """Return what a call of an operator does as a collective; None where it is none."""
    kind = kind_of(op)
    if kind is None:
        return None
    names = [argument.name for argument in schema_of(op).arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    group = _group_of(given)
    if group is None:
        return None
    size, rank = group.size(), group.rank()
    taken = sum(_num_bytes(given[name]) for name in _INPUTS if name in given)
    made = sum(_num_bytes(given[name]) for name in _OUTPUTS if name in given)
    root = next((given[name] for name in _ROOTS if name in given), 0)
    if kind == "all_to_all":
        sent, received = _exchanged(given, taken, made, size, rank)
    else:
        sent, received = _VOLUMES[kind](taken, made, size, rank == root)
    return Collective(
        kind=kind,
        group=group,
        ranks=tuple(ranks_of(group) or range(size)),
        rank=rank,
        sent_bytes=sent,
        received_bytes=received,
        reduce_op=given["reduce_op"] if isinstance(given.get("reduce_op"), str) else "",
        started=time.perf_counter(),
    )


def _group_of(given: Mapping[str, Any]) -> Any:
    boxed = given.get("process_group")
    name = given.get("group_name")
    if boxed is None:
        return group_named(name) if isinstance(name, str) else name
    try:
        return _c10d.ProcessGroup.unbox(boxed)
    except (AttributeError, RuntimeError):
        return None


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def _exchanged(
    given: Mapping[str, Any], taken: int, made: int, size: int, rank: int
) -> tuple[int, int]:
    """Return the bytes of an all-to-all, without what this rank keeps."""
    kept_in = _share(given.get("input_split_sizes"), taken, size, rank)
    output_splits = given.get("output_split_sizes")
    if not made and taken:  # the functional operator makes its output itself
        rows_in = sum(given.get("input_split_sizes") or ()) or 1
        made = taken * sum(output_splits) // rows_in if output_splits else taken
    kept_out = _share(output_splits, made, size, rank)
    return taken - kept_in, made - kept_out


def _share(splits: Any, num_bytes: int, size: int, rank: int) -> int:
    if not splits:
        return num_bytes // size
    return num_bytes * int(splits[rank]) // (sum(map(int, splits)) or 1)


_Volume = Callable[[int, int, int, bool], tuple[int, int]]


def _both(moved: int) -> tuple[int, int]:
    return moved, moved


def _either(is_sent: bool, sent: int, received: int) -> tuple[int, int]:
    return (sent, 0) if is_sent else (0, received)


_VOLUMES: dict[str, _Volume] = {
    "all_gather": lambda taken, made, size, is_root: _both(taken * (size - 1)),
    "all_reduce": lambda taken, made, size, is_root: _both(2 * taken * (size - 1) // size),
    "reduce_scatter": lambda taken, made, size, is_root: _both(taken * (size - 1) // size),
    "broadcast": lambda taken, made, size, is_root: _either(is_root, taken * (size - 1), taken),
    "reduce": lambda taken, made, size, is_root: _either(not is_root, taken, taken * (size - 1)),
    "gather": lambda taken, made, size, is_root: _either(not is_root, taken, taken * (size - 1)),
    "scatter": lambda taken, made, size, is_root: _either(
        is_root, taken * (size - 1) // size, made
    ),
    "send": lambda taken, made, size, is_root: (taken, 0),
    "receive": lambda taken, made, size, is_root: (0, taken),
    "barrier": lambda taken, made, size, is_root: (0, 0),
}


def is_collective(op: Any) -> bool:
    """Whether an operator is one of torch's collectives, or waits for one."""
    return getattr(op, "namespace", "") in _COLLECTIVE_NAMESPACES


_COLLECTIVE_NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
)
