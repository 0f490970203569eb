"""Four ranks of a job: dropout and activation checkpointing, from 4 ranks to 2 and to 3.

Run by test_job, one process per rank: torch's random numbers belong to a process.
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh
from tests.processes import join_group, leave_group

from .training import Net, Run, Training, deterministic, made, spread


class RemadeNet(Net):
    """Runs its blocks again in the backward pass, with the same dropout."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def trained(mesh: DeviceMesh, kind: str, count: int, source: Path | None, target: Path) -> Run:
    """Take steps from one checkpoint to the next one; only what this stage noted is returned."""
    start = made(dropout=0.3)
    if kind == "remade":
        start.__class__ = RemadeNet
    torch.manual_seed(dist.get_rank())  # ranks need not agree on what is drawn outside of steps
    training = Training(spread(start, mesh, "sharded"), mesh)
    group = mesh.get_group()
    if source is not None:
        ckpt.load(training.state, source, process_group=group)
    run = training.train(count)
    ckpt.save(training.state, target, process_group=group)
    return run


def main(folder: Path) -> None:
    rank = join_group()
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 3, 2)}
    whole = trained(meshes[4], "sharded", 4, None, folder / "whole")
    stages: list[tuple[DeviceMesh, str, int, Path | None, Path]] = [
        (meshes[4], "remade", 2, None, folder / "2"),
        (meshes[2], "sharded", 1, folder / "2", folder / "3"),
        (meshes[3], "remade", 1, folder / "3", folder / "4"),
    ]
    joined = Run()
    for mesh, kind, count, source, target in stages:
        if rank < mesh.size():
            run = trained(mesh, kind, count, source, target)
            joined.losses += run.losses
            joined.norms += run.norms
            joined.tensors = run.tensors
        dist.barrier()
    if rank < 2:
        assert joined.equals(whole)
    if rank == 0:
        other = copy.deepcopy(whole)
        other.losses[2] = math.nextafter(other.losses[2], 9)
        assert not other.equals(whole)


if __name__ == "__main__":
    with deterministic():
        main(Path(sys.argv[1]))
    leave_group()
