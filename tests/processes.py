"""Spawned ranks, for the few tests that need torch's default process group."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_processes(module: str, size: int, *args: str, timeout: float = 180) -> list[str]:
    """Run ``python -m module`` once per rank and return what each printed.

    The ranks find RANK, WORLD_SIZE and DTCKPT_TEST_INIT (an init method) in their environment.
    Raises AssertionError with the output of the first rank that fails.
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
