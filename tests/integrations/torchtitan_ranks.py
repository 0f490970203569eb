"""Ranks train with torchtitan's optimizers and schedules, and save and resume by its manager.

Its argument is a list of trainings, as JSON. Rank 0 prints what came of all, one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dtckpt.integrations.torchtitan import DtckptManager

from ..processes import join_group, leave_group

optimizers: Any = importlib.import_module("torchtitan.components.optimizer")
adapters: Any = importlib.import_module("torchtitan.protocols.state_dict_adapter")


class Renamed(adapters.StateDictAdapter):
    """The names of Hugging Face: those of torchtitan below ``net``."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"net.{key}": value for key, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {key.removeprefix("net."): value for key, value in hf_state_dict.items()}


class Progress:
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Data:
    """A data loader of torchtitan's: each rank of data parallelism has an entry, in bytes."""

    def __init__(self, rank: int) -> None:
        self.name = f"dp_rank_{rank}"
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {self.name: str(self.place).encode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = int(state[self.name])


def model_of(dp: int, tp: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
    if dp * tp == 1:
        return model
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(told: Any) -> Any:
    """Run a training and return what is to be known of it."""
    dp, tp = told.get("mesh", (1, 1))
    model, progress = model_of(dp, tp), Progress()
    data = Data(dist.get_rank() // tp if dist.is_initialized() else 0)
    adamw = optimizers.default_adamw(0.05)
    adamw.implementation = "for-loop"
    made = adamw.build(model_parts=[model])
    schedule = optimizers.LRSchedulersContainer.Config(warmup_steps=2)
    schedules = schedule.build(optimizers=made, training_steps=8)
    config = DtckptManager.Config(enable=True, interval=2, **told.get("config", {}))
    manager = config.build(
        dataloader=data,
        model_parts=[model],
        optimizers=made,
        lr_schedulers=schedules,
        states={"train_state": progress},
        sd_adapter=Renamed(),
        base_folder=told["folder"],
    )
    loaded = manager.load(step=told.get("load_step", -1))
    begun, losses = progress.step, list[float]()
    assert data.place == begun or "dataloader" in config.exclude_from_loading
    for _ in range(begun, told.get("until", 8)):
        made.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(progress.step))
        loss = model(inputs).square().mean()
        loss.backward()
        made.step()
        schedules.step()
        manager.maybe_wait_for_staging()
        losses.append(loss.item())
        progress.step += 1
        data.place = progress.step
        manager.save(progress.step, last_step=progress.step == told.get("last"))
        if progress.step == told.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    folder = Path(told["folder"], "checkpoint")
    names = sorted(path.name for path in folder.glob("*") if path.is_dir())
    return {"losses": losses, "loaded": loaded, "begun": begun, "saved": names}


def fit(number: int, told: Any) -> Any:
    dp, tp = told.get("mesh", (1, 1))
    if int(os.environ["RANK"]) >= dp * tp:
        return None
    if dp * tp > 1:
        join_group(dp * tp, str(number))
    try:
        return train(told)
    except Exception as error:
        if "error" not in told or told["error"] not in repr(error):
            raise
        return repr(error)
    finally:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def main(trainings: list[Any]) -> None:
    done = [fit(number, told) for number, told in enumerate(trainings)]
    print(json.dumps(done), flush=True)
    join_group()
    leave_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
