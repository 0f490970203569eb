"""Bytes of other programs' files changed at random: the same values, or an error of ours.

Elements have no checksums in most of these formats, so they may differ; nothing else may.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

import dtckpt.checkpoint as ckpt
from dtckpt.errors import DtckptError

from .test_dcp import whole
from .test_dcp_layouts import compressed

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own

_TENSORS = {"a": torch.arange(60.0).view(5, 12), "b": torch.ones(3).bfloat16()}
_STATE = {
    **_TENSORS,
    "turned": torch.arange(12).view(3, 4).T,
    "step": 3,
    "text": "words",
    "array": np.arange(5.0),
    "list": [1, {"x": torch.zeros(2)}],
}


def of_torch_save(folder: Path) -> Path:
    torch.save(_STATE, folder / "state.pt")
    return folder / "state.pt"


def of_dcp(folder: Path) -> Path:
    torch_dcp.save(_STATE, checkpoint_id=folder, no_dist=True)
    return folder


def of_dcp_compressed(folder: Path) -> Path:
    torch_dcp.save(_STATE, storage_writer=compressed(folder), no_dist=True)
    return folder


def of_safetensors(folder: Path) -> Path:
    save_file(_TENSORS, folder / "model.safetensors")
    return folder


def of_hugging_face(folder: Path) -> Path:
    names = {key: f"model-0000{i}-of-00002.safetensors" for i, key in enumerate(_TENSORS, 1)}
    for key, name in names.items():
        save_file({key: _TENSORS[key]}, folder / name)
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


KINDS: list[Callable[[Path], Path]] = [
    of_torch_save,
    of_dcp,
    of_dcp_compressed,
    of_safetensors,
    of_hugging_face,
]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a fault of some kind."""
    made = bytearray(data)
    start = rng.randrange(len(made))
    end = min(start + rng.randrange(1, 64), len(made))
    kind = rng.randrange(6)
    if kind < 3:
        for _ in range(rng.choice((1, 1, 4))):
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del made[start:]
    elif kind == 4:
        made[start:end] = bytes(end - start)
    else:
        made[start:start] = made[start:end]
    return bytes(made)


def without_elements(value: Any) -> Any:
    """Return a state with the shapes and dtypes of tensors in their places."""
    if isinstance(value, dict):
        return {key: without_elements(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_elements, value))
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("made", KINDS)
def test_damage_is_an_error_or_lies_in_elements(
    tmp_path: Path, made: Callable[[Path], Path]
) -> None:
    place = made(tmp_path)
    expected = without_elements(whole(ckpt.open(place).state_dict()))
    has_checksums = made is of_torch_save  # of all but elements
    rng = random.Random(0)
    files = sorted(path for path in tmp_path.iterdir() if path.is_file())
    errors: list[int] = []
    tracemalloc.start()
    try:
        for _ in range(100):
            file = rng.choice(files)
            data = file.read_bytes()
            file.write_bytes(damaged(data, rng))
            try:
                with ckpt.open(place) as opened:
                    found = without_elements(whole(opened.state_dict()))
                assert found == expected or not has_checksums
            except DtckptError as error:
                errors.append(len(str(error)))
            file.write_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert len(errors) > 30
    assert max(errors) < 3000
