"""Accelerate saves BatchNorm under DDP. Run by test_accelerate: FOLDER."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.integrations.accelerate import load_accelerator, save_accelerator

from ..processes import join_group, leave_group

accelerate: Any = importlib.import_module("accelerate")


def prepared(rank: int) -> tuple[Any, Any]:
    """Return an Accelerator and its model after a step, each rank with its own data."""
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    torch.manual_seed(rank)
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
    return accelerator, model.module


def main(folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": os.environ["RANK"],
    }
    rank = join_group()
    accelerator, net = prepared(rank)
    means = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, net[1].running_mean)
    assert not torch.equal(means[0], means[1])
    report: Any = save_accelerator(accelerator, f"{folder}/1", step=1)
    assert "models/0/1.running_mean" in report.first_rank_buffers
    other, fresh = prepared(rank + 5)
    load_accelerator(other, f"{folder}/1")
    assert torch.equal(fresh[1].running_mean, means[0])
    assert torch.equal(fresh[0].weight, net[0].weight)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
