"""A training as torch's tutorials of distributed checkpoints write it.

``dcp_ranks`` runs it twice: as it is, and with dtckpt in the place of torch in the lines that
import from ``torch.distributed.checkpoint``.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(16, 18)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(18, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


class AppState(Stateful):
    """The model and its optimizer, for DCP to ask and to give to."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int = 0) -> None:
        self.model = model
        self.optimizer = optimizer
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.epoch = state_dict["epoch"]


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ToyModel()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()


def run(folder: str) -> list[torch.Tensor]:
    """Train, save in both ways, and go on from each: return whole tensors after another step."""
    found: list[torch.Tensor] = []
    model, optimizer = make(1)
    step(model, optimizer)
    dcp.save({"app": AppState(model, optimizer, 3)}, checkpoint_id=f"{folder}/now")
    beside: Any = dist.new_group(backend="gloo")  # torch saves by collectives while it trains
    future: Any = None
    for epoch in range(2):  # as the recipe for saving in the background has it
        step(model, optimizer)
        if future is not None:
            future.result()
        writer = dcp.FileSystemWriter(f"{folder}/background", thread_count=2)
        state = {"app": AppState(model, optimizer, epoch)}
        future = dcp.async_save(state, storage_writer=writer, process_group=beside)
    step(model, optimizer)
    future.result()
    for name, epoch in (("now", 3), ("background", 1)):
        model, optimizer = make(2)
        app = AppState(model, optimizer)
        dcp.load({"app": app}, storage_reader=dcp.FileSystemReader(f"{folder}/{name}"))
        if app.epoch != epoch:
            raise AssertionError(f"{name}: epoch {app.epoch}, expected {epoch}")
        step(model, optimizer)
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            tensors: list[Any] = [parameter, state["exp_avg"], state["exp_avg_sq"]]
            found += [tensor.full_tensor().detach() for tensor in tensors]
    return found
