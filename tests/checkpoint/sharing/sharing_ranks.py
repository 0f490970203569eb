"""Four ranks in processes load rows as columns; some are killed. Run as a program by test_sharing.

One JSON object is printed: what each rank came to, by case.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.reading import limits
from dtckpt.dtensor import Shard
from dtckpt.errors import CheckpointError
from dtckpt.storage import Fault, FaultyStore, Rule, Store

from ...ranks import _c10d as c10d  # pyright: ignore[reportPrivateUsage]
from ...ranks import gloo_group
from .test_shared_reading import BLOCK, as_items, flat, saved, zeros

SIZE = 4
SHAPE = (256, 16)


class Kill(Fault):
    """Kill the process before the effect."""

    def before(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(root: Path, store: Store, rank: int, victim: int | None) -> str:
    """Load in a forked rank, and return how that ended."""
    group = gloo_group(c10d.FileStore(str(root / "rendezvous"), SIZE), rank, SIZE)
    rules = [Rule(Kill(), op="read_into", nth=5)] if rank == victim else []
    tensor, local = zeros(flat(SIZE, Shard(1), SHAPE), torch.float32, rank)
    try:
        report = dcp.load(
            {"w": tensor},
            FaultyStore(store, rules),
            process_group=group,
            timeout=timedelta(seconds=60),
        )
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    whole = as_items(dcp.open(store)["w"][...])
    if not (as_items(local) == whole[:, rank * 4 : rank * 4 + 4]).all():
        return "wrong"
    return "right" if "on one host" in report.read_once_reason else report.read_once_reason


def run_case(store: Store, victim: int | None) -> list[str]:
    """Run four ranks and return what each came to."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pids: list[int] = []
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    (root / f"end-{rank}").write_text(run_rank(root, store, rank, victim))
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        return [
            (root / f"end-{rank}").read_text() if code == 0 else "killed" if code == -9 else "died"
            for rank, code in enumerate(codes)
        ]


def main() -> None:
    """Run all cases."""
    limits.BLOCK_BYTES, limits.MIN_SHARED_BYTES = BLOCK, 0
    limits.STRIPE_BYTES = limits.SLOT_BYTES = 4 * BLOCK
    store = saved(w=("F32", flat(2, Shard(0), SHAPE)))
    told = {"right": run_case(store, None)}
    told |= {f"killed {victim}": run_case(store, victim) for victim in range(SIZE)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
