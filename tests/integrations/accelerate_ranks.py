"""Accelerate trains, and saves and resumes by dtckpt. Run by test_accelerate: FOLDER.

On two ranks by DDP, on two and four by FSDP2, and on one.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import dtckpt.checkpoint as ckpt
from dtckpt.integrations.accelerate import load_accelerator, newest, save_accelerator

from ..processes import join_group, leave_group

accelerate: Any = importlib.import_module("accelerate")
states: Any = importlib.import_module("accelerate.state")


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def made(kind: str) -> tuple[Any, Any]:
    """Return an Accelerator, and what it has prepared."""
    chosen = accelerate.utils.DataLoaderConfiguration(
        use_seedable_sampler=True, use_stateful_dataloader=kind == "places"
    )
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=chosen, step_scheduler_with_optimizer=False
    )
    if kind == "fsdp2":  # which Accelerate turns on for accelerators only
        plugin = accelerate.utils.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap"
        )
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = accelerate.utils.DistributedType.FSDP
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    rows: Any = list(range(8))
    data = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    parts = accelerator.prepare(model, optimizer, schedule, data)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, (*parts, counter)


def train(accelerator: Any, parts: Any, begin: int, end: int) -> list[float]:
    model, optimizer, schedule, _, counter = parts
    losses: list[float] = []
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 1
        losses.append(loss.item())
    return losses


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def resumed(kind: str, folder: str, losses: list[float]) -> list[float]:
    """Go on from the newest checkpoint of a folder, and return what is drawn next."""
    accelerator, parts = made(kind)
    path = newest(folder)
    assert path is not None
    load_accelerator(accelerator, path)
    drawn = draws()
    assert accelerator.step == 3
    assert parts[4].count == 4
    found = train(accelerator, parts, 4, 8)
    if losses:  # known to the first rank alone
        torch.testing.assert_close(found, losses[4:], rtol=1e-4, atol=1e-6)
    assert parts[3].get_sampler().epoch == 5
    return drawn


def saved(kind: str, folder: str) -> tuple[list[float], list[float]]:
    """Train, save in the middle, and return the losses and what is drawn after the save."""
    accelerator, parts = made(kind)
    losses = train(accelerator, parts, 0, 4)
    parts[3].get_sampler().set_epoch(5)
    random.seed(dist.get_rank() if dist.is_initialized() else 0)
    accelerator.step = 3
    begun = save_accelerator(accelerator, f"{folder}/4", step=4, in_background=True)
    drawn = draws()
    losses += train(accelerator, parts, 4, 8)
    if isinstance(begun, ckpt.SaveHandle):
        begun.result()
    if kind == "fsdp2":
        assert isinstance(next(parts[0].parameters()), DTensor)
    return losses, drawn


def goes_on_in_the_data(folder: str) -> None:
    """Save in the middle of an epoch, and see that others get the batches that were left."""
    accelerator, parts = made("places")
    left = iter(parts[3])
    next(left)
    save_accelerator(accelerator, folder)
    expected = [batch.tolist() for batch in left]
    assert len(expected) == 1, "of two batches for each of two ranks"
    states.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, parts = made("places")
    load_accelerator(accelerator, folder)
    assert [batch.tolist() for batch in parts[3]] == expected


def on(size: int, name: str, body: Any) -> Any:
    """Run something on the first ranks, with nothing of Accelerate left from before."""
    rank = int(os.environ["RANK"])
    if rank >= size:
        return None
    kept = dict(os.environ)
    if size > 1:
        join_group(size, name)
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    else:
        for variable in ("RANK", "WORLD_SIZE"):
            os.environ.pop(variable)
    try:
        return body()
    finally:
        states.AcceleratorState._reset_state(reset_partial_state=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        os.environ |= kept


def main(folder: str) -> None:
    runs = {"one": (1, "plain"), "ddp": (2, "plain"), "fsdp2": (2, "fsdp2")}
    told: dict[str, Any] = {}
    for name, (size, kind) in runs.items():
        place = f"{folder}/{name}"
        told[name] = on(size, name, partial(saved, kind, place))
    on(2, "places", partial(goes_on_in_the_data, f"{folder}/places"))
    others = {"fsdp4": (4, "fsdp2"), **runs}
    for first in runs:
        for second, (size, kind) in others.items():
            place, losses = f"{folder}/{first}", told["one"][0] if told["one"] else []
            drawn = on(size, f"{first}-{second}", partial(resumed, kind, place, losses))
            if drawn is not None and told[first] is not None:
                assert drawn == told[first][1], (first, second)
    join_group()
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
