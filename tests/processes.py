"""Spawned ranks, for the few tests that need torch's default process group."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def run_processes(module: str, size: int, *args: str, timeout: float = 180) -> list[str]:
    """Run ``python -m module`` once per rank and return what each printed.

    The module calls ``join_group`` first and ``leave_group`` last. Raises AssertionError with the
    output of the ranks that fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(size)]
        processes = [
            _start(module, args, rank, size, f"file://{folder}/rendezvous", outputs[rank])
            for rank in range(size)
        ]
        try:
            _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [output.read_text() for output in outputs]
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    told = "\n".join(f"rank {rank}:\n{texts[rank][-3000:]}" for rank in failed)
    assert not failed, told
    return texts


def _start(
    module: str, args: tuple[str, ...], rank: int, size: int, init: str, output: Path
) -> subprocess.Popen[bytes]:
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "DTCKPT_TEST_INIT": init,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=ROOT,
            env=os.environ | env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Return when all have ended; once one has failed the others get a few seconds more."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.05)


def join_group() -> int:
    """Make the default Gloo group of the ranks of ``run_processes`` and return this one's rank."""
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=os.environ["DTCKPT_TEST_INIT"],
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    return rank


def leave_group() -> None:
    """End this rank well; nothing that follows is run.

    Without ``_exit`` torch's Gloo threads sometimes abort the interpreter as it winds down.
    """
    dist.barrier()
    dist.destroy_process_group()
    print("ok", flush=True)
    os._exit(0)
