"""A Trainer saves BatchNorm under DDP. Run by test_transformers: FOLDER."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.integrations.transformers import DtckptTrainer

from ..processes import join_group, leave_group

transformers: Any = importlib.import_module("transformers")
ROWS = [{"x": row, "labels": row.sum()} for row in torch.randn(64, 4, generator=torch.Generator())]


class Net(nn.Module):
    """A layer and a batch norm, whose statistics each rank has of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": (self.norm(self.linear(x)).sum(-1) - labels).square().mean()}


def trainer(folder: str, max_steps: int) -> Any:
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        folder,
        max_steps=max_steps,
        save_steps=3,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    return DtckptTrainer(model=Net(), args=args, train_dataset=ROWS)


def main(folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": os.environ["RANK"],
    }
    join_group()
    first = trainer(folder, 3)
    first.train()
    norm = first.model.norm
    means = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, norm.running_mean)
    assert not torch.equal(means[0], means[1])
    with ckpt.open(f"{folder}/checkpoint-3") as opened:
        assert torch.equal(opened["model/norm.running_mean"][...], means[0])
    second = trainer(folder, 3)
    found: list[Tensor] = []

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found.extend(value.clone() for value in second.model.state_dict().values())

    second.add_callback(Look())
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    wanted = {**first.model.state_dict(), "norm.running_mean": means[0]}
    del wanted["norm.running_var"]
    for name, value in zip(first.model.state_dict(), found, strict=True):
        assert name not in wanted or torch.equal(value, wanted[name]), name
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
