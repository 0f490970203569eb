"""The policy for plain tensors beside distributed ones.

A plain tensor holds one rank's values, and nothing says what they are: the same on every rank, or
a part of a whole. It counts as the same on every rank, Replicate,

* without a question if it has one element (a number) or none, and within
  ``implicit_replication()``;
* else if the ranks find, by one number of each, that it is: a small collective at every call.

Where it differs, all ranks raise PlacementError.
"""

from __future__ import annotations

from torch import Tensor

from .device_mesh import DeviceMesh
from .fingerprints import is_same_everywhere
from .modes import replicates_plain_tensors


def may_be_plain(leaf: Tensor, mesh: DeviceMesh) -> bool:
    """Whether a plain tensor beside tensors on ``mesh`` is taken as equal on all of its ranks."""
    return leaf.numel() <= 1 or replicates_plain_tensors() or is_same_everywhere(leaf, mesh)
