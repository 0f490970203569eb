"""Four ranks that train with torch's ``fully_shard`` and with ours, option by option.

Run by test_beside_torch, one process per rank.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

import dtckpt.dtensor.fsdp as our_fsdp
from dtckpt.dtensor import init_device_mesh as our_mesh
from dtckpt.dtensor.debug import CommDebugMode

from ...processes import join_group, leave_group

WIDTH, STEPS = 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to shard, and to step."""

    name: str
    mesh: tuple[int, ...] = (4,)
    options: Callable[[ModuleType], dict[str, Any]] = lambda fsdp: {}
    prepare: Callable[[Any], None] = lambda model: None
    before: Callable[[Any, int], None] = lambda model, micro: None
    """Called before each of the two backward passes of a step."""
    pairs_ends: bool = False
    """Whether the embedding and the head are one group."""
    most: float = 1e-6
    """How far parameters of about one may differ: the order of sums is not the same on Gloo."""


def _prefetch(model: Any) -> None:
    blocks = list(model.blocks)
    for one, then in itertools.pairwise(blocks):
        one.set_modules_to_forward_prefetch([then])
        then.set_modules_to_backward_prefetch([one])


def _halve(row: Tensor) -> None:
    row.mul_(0.5)


OPTIONS = (
    Option(name="sharded"),
    Option(name="hsdp", mesh=(2, 2)),
    Option(name="kept", options=lambda fsdp: {"reshard_after_forward": False}),
    Option(name="smaller group", options=lambda fsdp: {"reshard_after_forward": 2}),
    Option(name="list of modules", pairs_ends=True),
    Option(name="prefetch", prepare=_prefetch),
    Option(
        name="accumulation",
        before=lambda model, micro: model.set_requires_gradient_sync(micro == 1),
    ),
    Option(
        name="accumulation over copies",
        mesh=(2, 2),
        before=lambda model, micro: model.set_requires_all_reduce(micro == 1),
    ),
    Option(
        name="one last backward pass",
        before=lambda model, micro: model.set_is_last_backward(micro == 1),
    ),
    Option(
        name="whole after backward",
        before=lambda model, micro: model.set_reshard_after_backward(micro == 1),
    ),
    Option(
        name="cpu", options=lambda fsdp: {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
    ),
    Option(
        name="mixed precision",
        options=lambda fsdp: {
            "mp_policy": fsdp.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        },
        most=1e-3,
    ),
    Option(
        name="hook",
        prepare=lambda model: model.blocks[0].set_all_reduce_hook(_halve),
    ),
)


def trained(option: Option, start: Net, mesh: Any, fsdp: ModuleType) -> tuple[Any, int]:
    """Return the parameters after some steps, whole, and the collectives of the last step."""
    model: Any = copy.deepcopy(start)
    options = option.options(fsdp)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, **options)
    if option.pairs_ends:
        fsdp.fully_shard([model.embed, model.head], mesh=mesh, **options)
    fsdp.fully_shard(model, mesh=mesh, **options)
    option.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    comm = CommDebugMode()  # which notes every operator, and takes most of the time of a step
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        with comm if step == STEPS - 1 else nullcontext():
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                tokens = torch.randint(16, (4, 5), generator=generator)
                option.before(model, micro)
                logits = model(tokens).float()
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for part in (*model.modules(),):
        if hasattr(part, "reshard"):
            part.reshard()
    named: Any = model.named_parameters()
    return {name: p.full_tensor().detach() for name, p in named}, comm.get_total_counts()


def main() -> None:
    """Compare all options."""
    join_group()
    torch.manual_seed(0)
    start = Net()
    meshes: dict[tuple[Any, tuple[int, ...]], Any] = {}
    for option in OPTIONS:
        found: list[tuple[Any, int]] = []
        for mesh_of, fsdp in ((torch_mesh, torch_fsdp), (our_mesh, our_fsdp)):
            key = mesh_of, option.mesh
            if key not in meshes:
                names = ("replicate", "shard")[-len(option.mesh) :]
                meshes[key] = mesh_of("cpu", option.mesh, mesh_dim_names=names)
            found.append(trained(option, start, meshes[key], fsdp))
        (theirs, their_count), (ours, our_count) = found
        worst = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
        print(f"{option.name}: {worst:.1e}, collectives {their_count} / {our_count}", flush=True)
        assert worst <= option.most, option.name
        assert our_count <= their_count, option.name
    leave_group()


if __name__ == "__main__":
    sys.exit(main())
