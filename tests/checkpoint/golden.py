"""The state that the checkpoints under tests/data hold, one directory per format version.

``python -m tests.checkpoint.golden DIR VERSION`` writes it anew with this version of the code; a
directory of a released version is never written again.
"""

from __future__ import annotations

import sys
from collections import deque
from datetime import UTC, date, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any

import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Layout, Mesh, Placement, Ragged, Replicate, Shard

from ..ranks import run_ranks
from .tensors.subclass_stand_ins import State8bit

MESH = Mesh((2, 2), ("dp", "tp"))
LAYOUTS: dict[str, tuple[tuple[Placement, ...], tuple[int, ...], torch.dtype]] = {
    "even": ((Shard(0), Shard(1)), (4, 6), torch.float32),
    "uneven": ((Shard(0), Replicate()), (5,), torch.bfloat16),
    "ordered": ((Shard(0, 1), Shard(0, 0)), (7, 2), torch.int64),
    "ragged": ((Replicate(), Ragged(1, (3, 1))), (2, 4), torch.float16),
    "replicated": ((Replicate(), Replicate()), (3,), torch.uint8),
    "empty": ((Shard(0), Shard(0)), (0, 3), torch.float32),
    "scalar": ((Replicate(), Replicate()), (), torch.float64),
}
LARGE: dict[str, torch.dtype] = {"weights": torch.bfloat16, "moments": torch.float32}
"""Tensors of version 2, large enough to be compressed, by name."""
LARGE_SHAPE = (128, 96)
VALUES: dict[Any, Any] = {
    "none": None,
    "bool": True,
    "int": -(2**70),
    "float": 0.1,
    "nan": float("nan"),
    "complex": 1 - 2j,
    "text": "Gr\u00fc\u00dfe/\u2713",
    "bytes": b"\x00\xff",
    "list": [1, [2.5], {}],
    "tuple": (1, (), "x"),
    "dotted.key": {"a/b": 1, "": 2, "#": 3},
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "size": torch.Size((2, 3)),
    "ints": {3: "three", -1: "minus one", "3": "text"},
}


LONG = [(number, -number / 3, f"line {number}") for number in range(2000)]
"""A packed value of version 3."""
STANDARD: dict[str, Any] = {
    "date": date(2026, 11, 28),
    "time": datetime(2026, 11, 28, 12, 30, tzinfo=UTC),
    "span": timedelta(days=2, microseconds=3),
    "path": PurePosixPath("a/b"),
    "set": {1, 2, 3},
    "queue": deque([1, 2], maxlen=4),
}
"""Values of types that version 3 has."""


def turned() -> torch.Tensor:
    """A tensor whose dims have another order in memory."""
    return torch.arange(6.0).reshape(2, 3).t()


def low_bit(*, is_filled: bool = True) -> State8bit:
    """A tensor subclass that is made of others."""
    made: State8bit = State8bit.zeros((2, 64))
    if is_filled:
        made.fill(torch.arange(128.0).reshape(2, 64) / 128)
    return made


def whole(name: str) -> torch.Tensor:
    """The whole of a tensor."""
    _, shape, dtype = LAYOUTS[name]
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) + 10 * len(name)).reshape(shape).to(dtype)


def large(name: str) -> torch.Tensor:
    """The whole of a large tensor: numbers around zero, the same on every machine."""
    count = LARGE_SHAPE[0] * LARGE_SHAPE[1]
    mixed = (torch.arange(count, dtype=torch.int64) * 2654435761) % (1 << 16)
    values = (mixed.to(torch.float64) / (1 << 16) - 0.5) / 32
    return (values * values.abs()).reshape(LARGE_SHAPE).to(LARGE[name])


def large_part(name: str, rank: int) -> DTensor:
    """A large tensor as one rank holds it."""
    placements = (Shard(0), Shard(1))
    coordinate = MESH.coordinate(rank)
    assert coordinate is not None
    local = large(name)[Layout(MESH, placements, LARGE_SHAPE).box(coordinate).slices].clone()
    return DTensor.from_local(
        local, DeviceMesh("cpu", MESH, rank=rank), placements, shape=LARGE_SHAPE
    )


def tensor(name: str, rank: int) -> DTensor:
    """A tensor as one rank holds it."""
    placements, shape, _ = LAYOUTS[name]
    coordinate = MESH.coordinate(rank)
    assert coordinate is not None
    local = whole(name)[Layout(MESH, placements, shape).box(coordinate).slices].clone()
    mesh = DeviceMesh("cpu", MESH, rank=rank)
    return DTensor.from_local(local, mesh, placements, shape=shape)


def state(rank: int, version: int) -> dict[str, Any]:
    """The state of one rank."""
    more: dict[str, Any] = {}
    if version > 1:
        more["large"] = {name: large_part(name, rank) for name in LARGE}
    if version > 2:
        more |= {"long": LONG, "standard": STANDARD, "turned": turned(), "low_bit": low_bit()}
    return more | {
        "model": {name: tensor(name, rank) for name in LAYOUTS},
        "plain": torch.arange(4.0),
        "rng": dcp.PerRank({"seed": rank, "state": torch.full((3,), rank)}),
        "values": VALUES,
    }


def write(target: str, version: int) -> None:
    """Save the state from four ranks."""

    def save(rank: int, group: Any) -> None:
        dcp.save(
            state(rank, version),
            target,
            process_group=group,
            metadata={"made": "by hand"},
            compress="zstd" if version > 1 else None,
        )

    run_ranks(4, save)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
