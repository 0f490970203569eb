"""Tied tensors: several names for one memory, such as the two ends of a language model.

They are written once. Each name is still a tensor of its own to whoever loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from .local_tensor import LocalTensor
from .materialising import memory_key


def find_ties(tensors: Mapping[str, LocalTensor]) -> dict[str, str]:
    """Return the name of the first of its kind for every further name of the same memory.

    Told by the storage that parts lie in, not by addresses: those of empty parts tell nothing, and
    ranks that hold nothing of a tensor must find the same ties as the others.
    """
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name in _suspects(tensors):
        local = tensors[name]
        parts = tuple(
            (box, memory_key(tensor), tensor.is_conj(), tensor.is_neg())
            for box, tensor in local.parts
        )
        key = (local.dtype, local.shape, local.layout, local.is_plain, parts)
        other = first.setdefault(key, name)
        if other != name:
            ties[name] = other
    return ties


def _suspects(tensors: Mapping[str, LocalTensor]) -> list[str]:
    """Return tensors that begin at one address with others, or whose address tells nothing."""
    by_address: dict[int, list[str]] = {}
    for name, local in tensors.items():
        if local.parts:
            by_address.setdefault(local.parts[0][1].data_ptr(), []).append(name)
    found = {name for names in by_address.values() if len(names) > 1 for name in names}
    return [name for name in tensors if name in found]
