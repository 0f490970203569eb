"""Two ranks resume by dtckpt what torchtitan's own manager has saved. Run by test_torchtitan."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtckpt.integrations.torchtitan import DtckptManager

from ..processes import join_group, leave_group
from .torchtitan_ranks import Data, Progress, Renamed, model_of, optimizers

theirs: Any = importlib.import_module("torchtitan.components.checkpointer")


def manager_of(config: Any, folder: str, mesh: tuple[int, int]) -> tuple[Any, Any, Progress]:
    model, progress = model_of(*mesh), Progress()
    adamw = optimizers.default_adamw(0.05)
    adamw.implementation = "for-loop"
    made = adamw.build(model_parts=[model])
    schedule = optimizers.LRSchedulersContainer.Config(warmup_steps=2)
    manager = config.build(
        dataloader=Data(0),
        model_parts=[model],
        optimizers=made,
        lr_schedulers=schedule.build(optimizers=made, training_steps=8),
        states={"train_state": progress},
        sd_adapter=Renamed(),
        base_folder=folder,
    )
    return manager, (model, made), progress


def values(parts: Any) -> list[torch.Tensor]:
    model, made = parts
    found = [*model.state_dict().values()]
    found += [value for value in made.state_dict().values() if isinstance(value, torch.Tensor)]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in found]


def main(folder: str) -> None:
    join_group()
    config = theirs.CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0)
    manager, parts, progress = manager_of(config, folder, (1, 2))
    parts[0](torch.ones(2, 6)).square().mean().backward()
    parts[1].step()
    progress.step = 1
    manager.save(1)
    ours = DtckptManager.Config(enable=True, interval=1, exclude_from_loading=["dataloader"])
    manager, loaded, progress = manager_of(ours, folder, (2, 1))
    assert manager.load()
    assert progress.step == 1
    for value, wanted in zip(values(loaded), values(parts), strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    progress.step = 2
    manager.save(2)
    manager.close()
    manager, _, progress = manager_of(ours, folder, (2, 1))
    assert manager.load()
    assert progress.step == 2, "those of dtckpt and of torchtitan are one line"
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
