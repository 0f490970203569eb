"""Readers of a directory of safetensors files with an index, each rank its part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as _dcp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from ..state import ShardedState
from .raw import bytes_of

# Its functions are annotated in part.
_api: Any = _dcp


class DcpHuggingFace:
    """torch.distributed.checkpoint with its ``HuggingFaceStorageReader``."""

    name = "DCP"

    def load(self, state: ShardedState, path: Path) -> None:
        reader = HuggingFaceStorageReader(str(path))
        _api.load(dict(state.tensors), storage_reader=reader, process_group=state.group)


class Slices:
    """``safe_open``, ``get_slice`` and a copy into the tensors that are there."""

    name = "safetensors"

    def load(self, state: ShardedState, path: Path) -> None:
        boxes, held = state.slices, state.locals
        for file, names in _files(path):
            with safe_open(path / file, framework="pt") as opened:
                for name in names:
                    held[name].copy_(opened.get_slice(name)[boxes[name]])


class RawSlices:
    """``preadv`` of the rows that a rank holds into the tensors that are there."""

    name = "raw"

    def load(self, state: ShardedState, path: Path) -> None:
        """Read rows; columns would be a system call for every row of theirs."""
        boxes, held = state.slices, state.locals
        for file, names in _files(path):
            descriptor = os.open(path / file, os.O_RDONLY)
            try:
                length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
                header = json.loads(os.pread(descriptor, length, 8))
                for name in names:
                    start, end = header[name]["data_offsets"]
                    row = (end - start) // header[name]["shape"][0]
                    at, view = 8 + length + start + boxes[name][0].start * row, bytes_of(held[name])
                    while view:
                        count = os.preadv(descriptor, [view], at)
                        at, view = at + count, view[count:]
            finally:
                os.close(descriptor)


def _files(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every file with the names of its tensors."""
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        yield file, [name for name, place in weight_map.items() if place == file]
