"""A small training for ``torchrun``: saves where all ranks agree, and stops when it is told to.

``python -m torch.distributed.run ... -m tests.checkpoint.manager.signalled_job ROOT LOGS``: each
rank writes what it does into a file of its own in LOGS, a line each.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.checkpoint import CheckpointManager, OnSignals


def main(root: str, logs: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    log = (Path(logs) / f"{size}.{restart}.{rank}").open("w", buffering=1)
    state: dict[str, Any] = {"w": torch.zeros(8), "step": 0}
    with CheckpointManager(
        root, when=(), on_signals=OnSignals(), timeout=timedelta(seconds=20)
    ) as manager:
        manager.restore_if_any(state)
        step = state["step"]
        print("begins", step, os.getpid(), file=log)
        while not manager.stopping:
            step += 1
            state["w"] += 1
            state["step"] = step
            dist.all_reduce(torch.ones(1))
            time.sleep(0.002 * (rank + 1))
            if manager.save(step, state):
                manager.wait()
                print("saved", step, "SIGTERM" if manager.stopping else "SIGUSR1", file=log)
    dist.destroy_process_group()
    print("ends", step, file=log)


if __name__ == "__main__":
    main(*sys.argv[1:])
