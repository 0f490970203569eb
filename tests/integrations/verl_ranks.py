"""Ranks save by verl's manager of dtckpt and load on others. Run by test_verl: FOLDER, 3 ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from dtckpt.integrations.verl import DtckptManager

from ..processes import join_group, leave_group


def made(**told: Any) -> tuple[Any, Any, Any, DtckptManager]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    manager = DtckptManager(model, optimizer, schedule, None, told or None, in_background=True)
    return model, optimizer, schedule, manager


def train(parts: Any, begin: int, end: int) -> list[float]:
    model, optimizer, schedule = parts
    losses: list[float] = []
    for step in range(begin, end):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str) -> None:
    losses, drawn = list[float](), 0.0
    if int(os.environ["RANK"]) < 2:
        join_group(2, "saving")
        *parts, manager = made(save_contents=["model", "optimizer", "extra", "hf_model"])
        for step in range(1, 5):
            losses += train(parts, step - 1, step)
            path = f"{folder}/global_step_{step}/actor"
            manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=2)
        drawn = torch.rand(()).item()
        losses += train(parts, 4, 8)
        manager.wait()
        dist.barrier()
        dist.destroy_process_group()
    join_group()
    *parts, manager = made()
    manager.load_checkpoint(f"{folder}/global_step_4/actor")
    if losses:
        assert torch.rand(()).item() == drawn
    found = train(parts, 4, 8)
    if losses:
        torch.testing.assert_close(found, losses[4:], rtol=1e-4, atol=1e-6)
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
