"""Four ranks of a job: dropout and activation checkpointing, from 4 ranks to 2 and to 3.

Run by test_job, one process per rank: torch's random numbers belong to a process.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, Mesh
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
    training = Training(spread(start, mesh, "plain" if kind == "plain" else "sharded"), mesh)
    group: Any = mesh.get_group() if mesh.size() > 1 else None
    options: dict[str, Any] = {"process_group": group, "no_dist": group is None}
    if source is not None:
        ckpt.load(training.state, source, **options)
    run = training.train(count)
    ckpt.save(training.state, target, **options)
    return run


def main(folder: Path) -> None:
    rank = join_group()
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (4, 3, 2)}
    whole = trained(meshes[4], "sharded", 8, None, folder / "whole")
    stages: list[tuple[DeviceMesh, str, int, Path | None, Path]] = [
        (meshes[4], "remade", 4, None, folder / "4"),
        (meshes[2], "sharded", 2, folder / "4", folder / "6"),
        (meshes[3], "remade", 2, folder / "6", folder / "8"),
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
        alone = trained(DeviceMesh("cpu", Mesh((1,)), rank=0), "plain", 8, None, folder / "alone")
        assert alone.equals(whole)
        other = copy.deepcopy(whole)
        other.losses[7] = torch.nextafter(*torch.tensor([whole.losses[7], 9.0]).double()).item()
        assert not other.equals(whole)


if __name__ == "__main__":
    with deterministic():
        main(Path(sys.argv[1]))
    leave_group()
