"""Make ``tests/data/verl-0.9.1.tar.xz`` anew, by the checkpoint manager of verl on two ranks.

    pip install --no-deps --target PLACE verl==0.9.1 omegaconf antlr4-python3-runtime==4.9.3
    PYTHONPATH=PLACE python -m tests.checkpoint.formats.makers.make_verl

``import verl`` wants ray and more, which a save does not use; so its packages are entered beside
their ``__init__``, and the modules of the manager are imported as they are. ``expected.pt`` is what
the ranks held together, by torch. ``fsdp1`` has the model as the older FSDP saves it.
"""

# pyright: reportPrivateImportUsage=false, reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib.util
import os
import random
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from . import making

RANKS = 2


class Config:
    """As much of a model's config as a save calls."""

    name_or_path = ""

    def save_pretrained(self, path: str) -> None:
        """Write a file as transformers would."""
        (Path(path) / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}\n')


class Tiny(nn.Module):
    """A parameter that ranks cut unevenly, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("scale", torch.arange(3.0))
        self.config = Config()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.norm(self.embed(ids)))

    def can_generate(self) -> bool:
        """Whether there is a config of generation to save."""
        return False


def whole(value: Any) -> Any:
    """Return a state with whole tensors."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def rank_main(rank: int, place: str) -> None:
    """Train a step and save, on one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29651"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for name in ("verl", "verl.utils.checkpoint"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        entered = sys.modules[name] = ModuleType(name)
        entered.__path__ = spec.submodule_search_locations or []
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.manual_seed(1)
    model = Tiny()
    expected: dict[str, Any] = {"fsdp1": dict(model.state_dict())}
    old = FullyShardedDataParallel(deepcopy(model), device_id=torch.device("cpu"))
    config: Any = {"save_contents": ["model"]}
    FSDPCheckpointManager(old, checkpoint_config=config).save_checkpoint(place + "/fsdp1")
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model(torch.tensor([[rank, 3, 5]])).square().sum().backward()
    optimizer.step()
    scheduler.step()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    manager.save_checkpoint(place, global_step=1)
    expected |= {"model": whole(model.state_dict()), "optim": whole(optimizer.state_dict())}
    if rank == 0:
        torch.save(expected, Path(place) / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with making("verl-0.9.1") as place:
        torch.multiprocessing.spawn(rank_main, (place,), nprocs=RANKS)
