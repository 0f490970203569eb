"""Lightning trains a small model, and saves and resumes by dtckpt. Run by test_lightning.

Its argument is a list of trainings, as JSON. All ranks see the same data, so that every kind of
parallelism gives the same training. Rank 0 prints the losses of all, one line of JSON, at the end.
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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dtckpt.integrations import lightning as ours

from ..processes import join_group, leave_group

lightning: Any = importlib.import_module("lightning")
callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
strategies: Any = importlib.import_module("lightning.pytorch.strategies")


class Net(lightning.LightningModule):
    """Two layers, with sizes that need not divide; ``tp`` of them are split over ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.losses: list[float] = []
        torch.manual_seed(0)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 3)

    def configure_model(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        if getattr(self, "is_spread", False):
            return
        self.is_spread = True
        if self.kind == "fsdp":  # which on CPUs has to be told so, and Lightning does not
            cpu: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
            self.up = FullyShardedDataParallel(self.up, **cpu)
            self.down = FullyShardedDataParallel(self.down, **cpu)
        if mesh is None:
            return
        if mesh["tensor_parallel"].size() > 1:
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            for layer in (self.up, self.down):
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def training_step(self, *_: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        loss = self(torch.randn(4, 6, generator=generator)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class KilledAt(callbacks.Callback):
    """Kill this process, as the system would, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(told: Any) -> Any:
    """Return the Trainer of one training."""
    kind, background = told["kind"], told.get("background", False)
    chosen: dict[str, Any] = {}
    if kind.startswith("mesh"):
        dp, tp = map(int, kind.removeprefix("mesh").split("x"))
        strategy: Any = ours.DtckptModelParallelStrategy(dp, tp, async_save=background)
    elif kind == "fsdp":
        strategy = ours.DtckptFSDPStrategy(async_save=background)
    else:
        strategy = strategies.DDPStrategy() if kind == "ddp" else "auto"
        chosen["plugins"] = [ours.DtckptIO(async_save=background)]
    made: list[Any] = [
        callbacks.ModelCheckpoint(
            told["folder"], every_n_train_steps=2, save_top_k=told.get("keep", 1)
        )
    ]
    if "kill" in told:
        made.append(KilledAt(told["kill"]))
    return lightning.Trainer(
        accelerator="cpu",
        devices=told["size"],
        strategy=strategy,
        max_steps=told["steps"],
        callbacks=made,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **chosen,
    )


def fit(number: int, told: Any) -> Any:
    """Run a training on the first ranks, and return what is to be known of it."""
    rank, size = int(os.environ["RANK"]), told["size"]
    if rank >= size:
        return None
    if size > 1:
        join_group(size, str(number))
    os.environ |= {"LOCAL_RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(size)}
    world, os.environ["WORLD_SIZE"] = os.environ["WORLD_SIZE"], str(size)
    try:
        return run(told)
    finally:
        os.environ["WORLD_SIZE"] = world
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()


def run(told: Any) -> Any:
    """Run a training, from the newest checkpoint of a folder if it is to resume."""
    resume = told.get("resume")
    path = ours.newest(resume) if resume else None
    if resume:
        assert path, f"nothing to go on from in {resume}"
    net = Net(told["kind"])
    trainer(told).fit(net, range(8), ckpt_path=path)
    names = sorted(path.name for path in Path(told["folder"]).iterdir())
    return {"losses": net.losses, "from": path and Path(path).name, "saved": names}


def main(trainings: list[Any]) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test",  # by which Lightning knows that ranks are there
    }
    done = [fit(number, told) for number, told in enumerate(trainings)]
    print(json.dumps(done), flush=True)
    join_group()
    leave_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
