"""Four ranks train under a parallelism of one library and go on under those of the other.

Called by fsdp_ranks, in one process per rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

import dtckpt.checkpoint as ckpt
import dtckpt.dtensor.fsdp as our_fsdp
import dtckpt.dtensor.parallel as our_parallel
from dtckpt.dtensor import init_device_mesh as our_mesh
from tools.demo.model import Config, make_model

# Sizes that divide along "tp", as torch's styles want them, and not along "dp".
CONFIG = Config(vocabulary=11, context=6, width=12, heads=4, hidden=20, blocks=1)
SPREADS = {"TP": (1, 1, 4), "HSDP": (2, 2, 1), "FSDP x TP": (1, 2, 2), "FSDP": (1, 4, 1)}
"""Ranks along "rep", "dp" and "tp"."""
PAIRS = {"TP": ["FSDP x TP"], "HSDP": ["TP"], "FSDP x TP": ["FSDP x TP", "HSDP"]}
"""From which parallelism to which of the other library; files do not know the library."""
BEFORE, AFTER = 1, 2
"""Steps before and after a checkpoint."""


@dataclass(frozen=True, slots=True)
class Library:
    """Where meshes, styles and ``fully_shard`` come from."""

    name: str
    mesh: Any
    parallel: Any
    fsdp: Any


OURS = Library("ours", our_mesh, our_parallel, our_fsdp)
TORCHS = Library("torch's", torch_mesh, torch_parallel, torch_fsdp)


@cache
def mesh_of(library: Library, spread: str) -> Any:
    """Return the mesh of a parallelism."""
    return library.mesh("cpu", SPREADS[spread], mesh_dim_names=("rep", "dp", "tp"))


class Training:
    """A model and its optimizer, under a parallelism of a library, or on one device."""

    def __init__(self, seed: int, library: Library | None = None, spread: str = "") -> None:
        self.name = f"{library.name if library else ''} {spread}"
        self.model: Any = make_model(seed, CONFIG).double()
        self.part: Any = slice(None)
        if library is not None:
            self.spread(library, mesh_of(library, spread), SPREADS[spread])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.bits: dict[str, Tensor] = {}
        """What was saved."""

    def spread(self, library: Library, mesh: Any, sizes: tuple[int, int, int]) -> None:
        """Apply styles along "tp" and ``fully_shard`` over the other axes."""
        repeated, sharded, split = sizes
        if split > 1:
            columns = ("attention.query", "attention.key", "attention.value", "up")
            styles = {name: library.parallel.ColwiseParallel() for name in columns}
            styles |= {
                name: library.parallel.RowwiseParallel() for name in ("attention.out", "down")
            }
            for block in self.model.blocks:
                library.parallel.parallelize_module(block, mesh["tp"], styles)
        if sharded > 1:
            over = mesh["rep", "dp"] if repeated > 1 else mesh["dp"]
            for module in (*self.model.blocks, self.model):
                library.fsdp.fully_shard(module, mesh=over)
            rank = mesh.get_local_rank("rep") * sharded + mesh.get_local_rank("dp")
            rows = 4 // (repeated * sharded)
            self.part = slice(rank * rows, (rank + 1) * rows)

    def train(self, steps: int) -> list[float]:
        """Make steps, each on a batch of its own; return the losses of whole batches."""
        losses: list[Tensor] = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.state["step"])
            sizes = (4, CONFIG.context + 1)
            tokens = torch.randint(CONFIG.vocabulary, sizes, generator=generator)[self.part]
            losses.append(self.model(tokens[:, :-1], tokens[:, 1:]))
            losses[-1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1
        total = torch.stack(losses).detach()
        dist.all_reduce(total)  # ranks along "tp" have the same
        return (total / dist.get_world_size()).tolist()

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments, whole."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            for key, value in {"": parameter, **moments}.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name} {key}"] = whole.detach().clone()
        return found


def check(source: Training, target: Training, expected: list[float], how: str) -> None:
    """Raise AssertionError unless a training has another one's bits and goes on as expected."""
    what = f"from {source.name} to {target.name}{how}"
    tensors = target.tensors()
    assert tensors.keys() == source.bits.keys(), what
    for name, tensor in source.bits.items():
        assert torch.equal(tensors[name], tensor), f"{what}: {name}"
    assert target.state["step"] == BEFORE, what
    losses = target.train(AFTER)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0, msg=f"{what}: {losses}")


def by_parts(source: Training, target: Training, folder: str) -> None:
    """Go through torch.distributed.checkpoint, with every rank's part."""
    torch_save(parts_of(source), checkpoint_id=folder)
    take_parts(target, partial(torch_load, checkpoint_id=folder))


def take_parts(target: Training, load: Callable[[dict[str, Any]], object]) -> None:
    """Give a training the state that ``load`` puts into its parts."""
    state = parts_of(target)
    load(state)
    set_state_dict(
        target.model,
        target.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def parts_of(training: Training) -> dict[str, Any]:
    """Return torch's view of the state of a training."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def as_a_whole(source: Training, target: Training) -> None:
    """Go through whole state dicts, which the first rank has and sends to all others."""
    gathers = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(source.model, source.optimizer, options=gathers)
    sends = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Not set_state_dict, which does nothing on ranks that have nothing.
    set_model_state_dict(target.model, model, options=sends)
    set_optimizer_state_dict(target.model, target.optimizer, optimizer, options=sends)


def check_crossings(folder: str) -> None:
    """Run all crossings on this rank."""
    alone = Training(1)
    expected = alone.train(BEFORE + AFTER)[BEFORE:]
    sources: dict[tuple[str, str], Training] = {}
    for library, spread in itertools.product((OURS, TORCHS), PAIRS):
        source = sources[library.name, spread] = Training(1, library, spread)
        source.train(BEFORE)
        source.bits = source.tensors()
        ckpt.save(source.state, f"{folder}/{source.name}")
    for here, there in ((OURS, TORCHS), (TORCHS, OURS)):
        for spread, others in PAIRS.items():
            source = sources[here.name, spread]
            for other in others:
                target = Training(2, there, other)
                ckpt.load(target.state, f"{folder}/{source.name}")
                check(source, target, expected, "")
        source, target = sources[here.name, "FSDP x TP"], Training(2, there, "HSDP")
        by_parts(source, target, f"{folder}/{here.name} parts")
        target.state["step"] = BEFORE
        check(source, target, expected, " by torch.distributed.checkpoint")
        for other in ("HSDP", "FSDP x TP"):  # what torch saved, read by dtckpt
            target = Training(2, there, other)
            take_parts(target, partial(ckpt.load, checkpoint_id=f"{folder}/{here.name} parts"))
            target.state["step"] = BEFORE
            check(source, target, expected, f" by torch's checkpoint, read here, as {other}")
        target = Training(2, there, "FSDP")
        as_a_whole(source, target)
        target.state["step"] = BEFORE
        check(source, target, expected, " by whole state dicts")
