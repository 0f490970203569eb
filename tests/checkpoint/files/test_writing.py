"""Bytes of chunks get to where the file has them, by every way of writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.storage import Delay, FaultyStore, LocalStore, MemoryStore, Rule, Store


def state(*, large: int) -> dict[str, Any]:
    """Small and large tensors, narrow and wide elements, in no order."""
    generator = torch.Generator().manual_seed(large)

    def random(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(count, generator=generator).to(dtype)

    return {
        "a": random(100, torch.bfloat16),
        "b": random(large, torch.float32),
        "c": random(1000, torch.float64),
        "d": random(large, torch.bfloat16),
        "e": random(100, torch.float32),
        "f": torch.empty(0),
        "g": random(large, torch.float32),
        "h": random(7, torch.float32),
    }


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_small_and_large_chunks_lie_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, background: bool
) -> None:
    """Large ones do not fit into what gathers small ones, nor into a buffer of direct I/O."""
    monkeypatch.setattr("dtckpt.storage.local.store._DIRECT_BYTES", 1)
    inner: Store = LocalStore(tmp_path, direct_io=True) if direct else MemoryStore()
    late = FaultyStore(inner, [Rule(Delay(0.02), op="write")])  # what is under way is not reused
    value = state(large=7 << 20 if direct else 1 << 17)
    if background:
        dcp.async_save(value, late).result(60)
    else:
        dcp.save(value, late)
    with dcp.open(inner) as checkpoint:
        for name, tensor in value.items():
            assert torch.equal(checkpoint[name][...], tensor), name
