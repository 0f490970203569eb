"""Buffers of which the first rank of a group has the value that counts, as under DDP.

DistributedDataParallel makes the buffers of its first rank those of all at the next forward pass.
Until then ranks have other ones: running statistics of BatchNorm are of each rank's own data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..tensors.local_tensor import LocalTensor
from ..tensors.materialising import Key, memory_key
from ..tensors.subclasses import plain_tensors

_declared: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""The first rank of the group over which each module is replicated."""


def buffers_of_first_rank(module: torch.nn.Module, process_group: Any = None) -> None:
    """Declare that buffers of a module count as the first rank of a group has them.

    ``save`` then takes them from there, wherever the state has them, and names them in its report;
    buffers that ranks have unlike are refused otherwise. It is so without this for the buffers of
    DistributedDataParallel modules in the state, unless ``broadcast_buffers=False``. Declare the
    module itself where the state has that instead of the DDP around it. ``process_group`` is that
    over which it is replicated, by default the default group. All ranks call it; once is enough.

    >>> import torch
    >>> buffers_of_first_rank(torch.nn.BatchNorm1d(4))  # without a group there is nothing to choose
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _declared[module] = _first_rank(process_group)


def declare_buffers_of_ddp(module: Any) -> None:
    """Declare what a DDP wraps, for those who save that alone; does nothing for other modules."""
    if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
        _declared[module.module] = _first_rank(module.process_group)


def with_first_rank_buffers(
    tensors: Mapping[str, LocalTensor], objects: Iterable[Any], rank: int, everyone: Iterable[int]
) -> tuple[dict[str, LocalTensor], tuple[str, ...]]:
    """Return tensors of which some are held by one rank alone, and the names of these.

    ``objects`` are those of the state. Buffers whose first rank takes no part stay as they are.
    """
    firsts: dict[Key, int] = {}
    there = set(everyone)
    for module, first in (*_of_ddp(objects), *_declared.items()):
        if first in there:
            firsts.update(
                (memory_key(part), first)
                for buffer in module.buffers()
                if buffer.numel()
                for part in plain_tensors(buffer)
            )
    if not firsts:
        return dict(tensors), ()
    found = dict(tensors)
    names: list[str] = []
    for name, local in tensors.items():
        if local.is_plain and (first := firsts.get(memory_key(local.parts[0][1]))) is not None:
            parts = local.parts if rank == first else ()
            found[name] = replace(local, is_plain=False, parts=parts)
            names.append(name)
    return found, tuple(names)


def _of_ddp(objects: Iterable[Any]) -> Iterator[tuple[torch.nn.Module, int]]:
    """Yield the modules that DDP wraps, in the state or right below a module of it."""
    for value in objects:
        if isinstance(value, torch.nn.Module):
            for part in (value, *value.children()):
                if isinstance(part, DistributedDataParallel) and part.broadcast_buffers:
                    yield part.module, _first_rank(part.process_group)


def _first_rank(process_group: Any) -> int:
    return torch.distributed.get_process_group_ranks(process_group)[0]
