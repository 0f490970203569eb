"""Boxes of stored tensors, read into new tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...dtensor.geometry.box import Box
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..tensors.transfer import TensorSink, in_huge_pages
from .execution import ReadCache, execute
from .read_plan import plan_reads
from .wants import Want


def read_boxes(
    data: StoredData,
    tensor: StoredTensor,
    boxes: Sequence[Box],
    cache: ReadCache | None = None,
    *,
    check_files: bool = True,
) -> list[torch.Tensor]:
    """Return the elements of every box as a contiguous CPU tensor of its sizes.

    ``check_files`` is that of ``execute``.
    """
    dtype = getattr(torch, tensor.dtype.torch_name)
    found = [in_huge_pages(torch.empty(b.sizes, dtype=dtype, device="cpu")) for b in boxes]
    wants = [
        Want(tensor=tensor, box=box, sink=TensorSink(out))
        for box, out in zip(boxes, found, strict=True)
    ]
    execute(plan_reads(data, wants), cache=cache, check_files=check_files)
    return found


def read_whole(data: StoredData, tensor: StoredTensor) -> torch.Tensor:
    """Return all elements of a stored tensor."""
    (found,) = read_boxes(data, tensor, [Box.whole(tensor.shape)], check_files=False)
    return found
