"""Ranks of a training whose run lies on a server; also as a process that is killed in a save.

``python -m tests.servers.training URL OPTIONS CALL`` saves step 1, then begins step 2 and kills
itself where a store is called by that name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.storage import FsspecStore, ObstoreStore, WriteStream

from ..ranks import run_ranks

WORLD = 4
SMALL, LARGE = (8, 300), (8, (1 << 20) + 64)
"""Shapes: what a rank holds of the large one is sent in parts."""


def whole(shape: tuple[int, int], step: int) -> torch.Tensor:
    """Return a tensor whose elements all differ, and from those of other steps."""
    rows, columns = shape
    return torch.arange(rows * columns, dtype=torch.int64).reshape(shape) * 7 + step


def state_of(
    rank: int, size: int, group: Any, step: int, *, shape: tuple[int, int], dim: int = 0
) -> dict[str, Any]:
    """Return what a rank holds of the step: a tensor that never changes, and others."""
    mesh = DeviceMesh("cpu", Mesh((size,)), groups=[group])

    def part(tensor: torch.Tensor) -> DTensor:
        local = tensor.chunk(size, dim)[rank].contiguous()
        return DTensor.from_local(local, mesh, [Shard(dim)], shape=tuple(tensor.shape))

    return {
        "frozen": part(whole(shape, 0)),
        "trained": part(whole(SMALL, step)),
        "bias": torch.full((5,), step).bfloat16(),
        "step": step,
    }


def is_step(
    state: dict[str, Any], rank: int, size: int, step: int, shape: tuple[int, int], dim: int
) -> bool:
    """Whether a rank holds exactly this."""
    expected = {"frozen": whole(shape, 0), "trained": whole(SMALL, step)}
    return (
        state["step"] == step
        and bool((state["bias"] == step).all())
        and all(
            torch.equal(state[name].to_local(), value.chunk(size, dim)[rank])
            for name, value in expected.items()
        )
    )


def save_all(
    url: str, options: dict[str, Any], step: int, *, shape: tuple[int, int] = SMALL, **more: Any
) -> list[ckpt.SaveReport]:
    """Save a step from all ranks."""

    def save(rank: int, group: Any) -> ckpt.SaveReport:
        return ckpt.save(
            state_of(rank, WORLD, group, step, shape=shape),
            f"{url}/step-{step}",
            process_group=group,
            storage_options=options,
            **more,
        )

    return run_ranks(WORLD, save)


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Be killed in the second save."""
    url, given, call = sys.argv[1:]
    options = json.loads(given)
    save_all(url, options, 1)
    owners: tuple[Any, ...] = (FsspecStore, ObstoreStore) if call == "publish" else (WriteStream,)
    for owner in owners:
        setattr(owner, call, _die)
    save_all(url, options, 2)


if __name__ == "__main__":
    main()
