"""Sharded state dicts of a running Megatron, filled from what it has saved, and saved.

Their tensors have the attributes of megatron-core 0.16.1, which is too large to be installed here;
the checkpoint is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtckpt.checkpoint as dcp
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ..ranks import run_ranks
from .formats.makers import unpacked


@dataclass
class ShardedTensor:
    """As megatron-core has it."""

    key: str
    data: Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


FC1, FC2 = "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc2.weight"
NORM, OUT = "decoder.final_layernorm.weight", "output_layer.weight"
SHAPES = {FC1: (2, 24, 8), FC2: (2, 8, 12), NORM: (8,), OUT: (32, 8)}


def cut(key: str, data: Tensor, *offset: int, prepended: int = 0) -> ShardedTensor:
    """A part at an offset."""
    sizes = tuple(data.shape)
    return ShardedTensor(
        key, data, data.dtype, sizes, SHAPES[key], offset, prepend_axis_num=prepended
    )


def model(rank: int, size: int) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """A sharded state dict under tensor parallelism, and the parameters that it is of."""
    params = {
        FC1: [torch.zeros(24 // size, 8) for _ in range(2)],  # gate and up, one below the other
        FC2: [torch.zeros(8, 12 // size) for _ in range(2)],
        NORM: [torch.zeros(8)],
        OUT: [torch.zeros(32 // size, 8)],
    }
    gates, rows = 12 // size, 32 // size
    sharded: dict[str, Any] = {"final": cut(NORM, params[NORM][0], 0), "iteration": 1}
    sharded["out"] = cut(OUT, params[OUT][0], rank * rows, 0)
    for layer in range(2):
        gate, up = params[FC1][layer].chunk(2)
        sharded[f"layers.{layer}"] = {
            "fc1": [
                cut(FC1, gate, layer, rank * gates, 0, prepended=1),
                cut(FC1, up, layer, 12 + rank * gates, 0, prepended=1),
            ],
            "fc2": cut(FC2, params[FC2][layer], layer, 0, rank * gates, prepended=1),
        }
    return {"model": sharded}, params


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_tensor_parallelism_goes_on_from_megatrons_own(size: int, tmp_path: Path) -> None:
    made = unpacked("megatron-core-0.16.1", tmp_path / "iter_0000010")
    expected = torch.load(made / "expected.pt")
    store = MemoryStore()

    def run(rank: int, group: Any) -> None:
        sharded, params = model(rank, size)
        tensors = dcp.megatron_tensors(sharded)
        dcp.load(tensors, made, process_group=group, strict="state")
        gates, rows = 12 // size, 32 // size
        for layer in range(2):
            wanted = expected[FC1][layer].unflatten(0, (2, 12))[:, rank * gates :][:, :gates]
            assert params[FC1][layer].equal(wanted.flatten(0, 1)), "the parameter itself"
            columns = slice(rank * gates, (rank + 1) * gates)
            assert params[FC2][layer].equal(expected[FC2][layer][:, columns])
        assert params[NORM][0].equal(expected[NORM])
        assert params[OUT][0].equal(expected[OUT][rank * rows : (rank + 1) * rows])
        dcp.save(tensors, store, process_group=group)

    run_ranks(size, run)
    saved = dcp.open(store)
    assert set(saved) == set(SHAPES)
    for key in SHAPES:
        assert saved[key][...].equal(expected[key])


def test_what_cannot_be_told_is_refused() -> None:
    class Factory:
        """As a fused weight has one until it is applied."""

        build_fn = key = data = None

    part = torch.zeros(16, 8)
    several: dict[str, tuple[Any, str]] = {
        "factory": (Factory(), "a: a Factory, of which tensors are still to be made; call apply_f"),
        "no data": (ShardedTensor(OUT, None, part.dtype, (16, 8), (32, 8), (0, 0)), "no data"),
        "flattened": (
            ShardedTensor(
                OUT, part[0], part.dtype, (16, 8), (32, 8), (0, 0), flattened_range=slice(0, 8)
            ),
            "a part of a flattened tensor",
        ),
        "outside": (cut(OUT, part, 20, 0), r"\[20:36,0:8\] of \[32, 8\]"),
        "negative": (cut(OUT, part, -1, 0), "must not be negative"),
        "other sizes": (
            ShardedTensor(OUT, part, part.dtype, (8, 8), (32, 8), (0, 0)),
            r"\[0:8,0:8\] of \[32, 8\], and its data is \[16, 8\]",
        ),
        "twice": ([cut(OUT, part, 0, 0), cut(OUT, part.clone(), 0, 0)], "otherwise at another"),
        "two dtypes": ([cut(OUT, part, 0, 0), cut(OUT, part.double(), 16, 0)], "otherwise at"),
    }
    for value, message in several.values():
        with pytest.raises(LayoutMismatch, match=message):
            dcp.megatron_tensors({"a": value})
    tied = dcp.megatron_tensors({"a": cut(OUT, part, 0, 0), "b": cut(OUT, part, 0, 0)})
    assert len(tied[OUT].parts) == 1
    half = dcp.megatron_tensors({"a": cut(OUT, part, 0, 0), "b": object(), "step": 3})
    with pytest.raises(LayoutMismatch, match="hold 128 of the 256 elements"):
        dcp.save(half, MemoryStore())
