"""The policy for plain tensors beside distributed ones.

A plain tensor holds one rank's values, and nothing says what they are: the same on every rank, or
a part of a whole. It counts as the same on every rank, Replicate,

* without a question if it has one element (a number) or none, and within
  ``implicit_replication()``;
* else if the ranks find, by one number of each, that it is: a small collective at every call.

Where it differs, all ranks raise PlacementError.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..comm.collectives import to_bytes
from ..comm.reductions import all_reduce
from ..comm.traffic import asking
from ..torch_private import NotRecorded, is_traced
from .device_mesh import DeviceMesh
from .modes import replicates_plain_tensors

# Odd 64-bit multipliers: the golden ratio's and those of Vigna's SplitMix64, as signed integers.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def may_be_plain(leaf: Tensor, mesh: DeviceMesh) -> bool:
    """Whether a plain tensor beside tensors on ``mesh`` is taken as equal on all of its ranks."""
    return leaf.numel() <= 1 or replicates_plain_tensors() or _is_same_everywhere(leaf, mesh)


def _is_same_everywhere(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether all ranks of the mesh pass tensors of the same shape, dtype and bits.

    Collective, with one number per rank: a fingerprint that differs for tensors that differ, but
    for a chance of about 2**-63. A rank outside of the mesh takes no part and gets True.
    """
    if is_traced(tensor):
        raise NotRecorded(
            f"a plain tensor of shape {tuple(tensor.shape)} beside DTensors: whether it is the "
            "same on all ranks is not seen in a graph; make it one with DTensor.from_local, or "
            "enter implicit_replication()"
        )
    if mesh.is_silent or mesh.get_coordinate() is None:
        return True
    device = mesh.device
    value = fingerprint(tensor)
    both = torch.tensor([value, ~value], dtype=torch.int64, device=device)
    with asking("agreement"):
        for axis in range(mesh.ndim):
            if mesh.shape[axis] > 1:
                both = all_reduce(both, "max", mesh.peers((axis,)))
    highest, lowest = both.tolist()
    return highest == ~lowest


def fingerprint(tensor: Tensor) -> int:
    """Return a signed 64-bit number for dtype, shape and bits; of a meta tensor without bits."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    start = int.from_bytes(hashlib.sha256(kind).digest()[:8], signed=True)
    if tensor.is_meta or tensor.numel() == 0:
        return start
    data = to_bytes(tensor)
    words = torch.zeros(-(-data.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
    words[: data.numel()] = data
    mixed = words.view(torch.int64)
    mixed ^= torch.arange(1, mixed.numel() + 1, device=data.device).mul_(_STEP).add_(start)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> 31
    return int(mixed.sum().item())
