"""Staging memory: one image for each data file, as it is written."""

from __future__ import annotations

import numpy as np
import torch

from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.files.writing import Chunk
from dtckpt.checkpoint.staging.area import StagingArea, copy_all
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.transfer import TensorSource
from dtckpt.dtensor import Box, Layout, Mesh


def chunk(name: str, tensor: torch.Tensor) -> tuple[Chunk, torch.Tensor]:
    shape = tuple(tensor.shape)
    stored = StoredTensor(name, DTYPES["F32"], shape, Layout.replicated(Mesh((1,)), shape))
    return Chunk(tensor=stored, box=Box.whole(shape), source=TensorSource(tensor)), tensor


def test_files_lie_one_after_the_other_from_pages_on() -> None:
    tensors = [torch.arange(n, dtype=torch.float32) for n in (3, 0, 1500, 7)]
    files = [[chunk("a", tensors[0]), chunk("b", tensors[1])], [], [chunk("c", tensors[2])]]
    files.append([chunk("d", tensors[3])])
    area = StagingArea()
    staged = area.lay_out(files)
    starts = [
        np.frombuffer(found.image, dtype=np.uint8).ctypes.data for found in staged if found.image
    ]
    assert [start - starts[0] for start in starts] == [0, 4096, 3 * 4096]
    assert starts[0] % 4096 == 0
    copy_all([copy for found in staged for copy in found.copies], lambda: None)
    for tensor in tensors:
        tensor.fill_(-1)
    read = [
        b"".join(piece for made in found.chunks for piece in made.source.pieces(1 << 20))
        for found in staged
    ]
    assert [np.frombuffer(data, dtype=np.float32).tolist() for data in read] == [
        [0.0, 1.0, 2.0],
        [],
        [float(n) for n in range(1500)],
        [float(n) for n in range(7)],
    ]
    assert bytes(staged[2].image[:6000]) == read[2]
