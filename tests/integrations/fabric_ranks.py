"""Fabric saves on one mesh and loads on another. Run by test_lightning."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtckpt.integrations.lightning import DtckptFabricModelParallelStrategy

from ..processes import join_group, leave_group

lightning: Any = importlib.import_module("lightning")


def spread(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def made() -> tuple[Any, dict[str, Any]]:
    """Return Fabric on the ranks of the job, and a state to be trained."""
    size = dist.get_world_size()
    strategy = DtckptFabricModelParallelStrategy(spread, 1, size, async_save=True)
    fabric = lightning.Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 3))
    model = fabric.setup_module(plain)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    return fabric, {"model": model, "optimizer": optimizer, "step": 0}


def only_biases(key: str, _: Any) -> bool:
    return "bias" in key


def save(folder: str) -> None:
    fabric, state = made()
    fabric.backward(state["model"](torch.ones(2, 6)).square().mean())
    state["optimizer"].step()
    fabric.save(f"{folder}/one", state | {"step": 1, "more": [2]})
    fabric.save(f"{folder}/two", state, filter={"model": only_biases})
    fabric.strategy.teardown()


def load(folder: str) -> None:
    fabric, state = made()
    assert fabric.load(f"{folder}/one", state) == {"more": [2]}
    assert state["step"] == 1
    moments = [entry["exp_avg"] for entry in state["optimizer"].state.values()]
    assert len(moments) == 4
    assert any(isinstance(moment, DTensor) for moment in moments)
    model = state["model"]
    found = model(torch.ones(2, 6)).sum().item()
    fabric.load(f"{folder}/two", {"model": model}, strict=False)
    assert model(torch.ones(2, 6)).sum().item() == found
    fabric.strategy.teardown()


def main(folder: str) -> None:
    """Save on two ranks and load on all."""
    rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test",  # by which Lightning knows that ranks are there
    }
    if rank < 2:
        join_group(2, "saving")
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        save(folder)
        dist.barrier()
        dist.destroy_process_group()
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    join_group()
    load(folder)
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
