"""A small language model, trained in steps whose bits are compared."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtckpt.dtensor import DeviceMesh, DTensor, distribute_module
from dtckpt.dtensor.elastic import ElasticSampler, ElasticSteps
from dtckpt.dtensor.fsdp import fully_shard

WORDS, LENGTH, BATCH = 23, 7, 12
DATA = torch.randint(WORDS, (40, LENGTH + 1), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).unsqueeze(1).chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(attended.squeeze(1))
        return x + self.scale * self.dropout(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """Its head is the table of its words; their places are not trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        width = 10
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.places.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def loss_of(model: Any, part: Tensor) -> Tensor:
    logits = model(part[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())


def spread(start: nn.Module, mesh: DeviceMesh, kind: str, **options: Any) -> Any:
    """Return a copy that is sharded, replicated or plain."""
    model: Any = copy.deepcopy(start)
    if kind == "sharded":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    elif kind == "replicated":
        distribute_module(model, mesh)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@dataclass
class Run:
    """What is compared."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    tensors: list[Tensor] = field(default_factory=list[Tensor])

    def equals(self, other: Run) -> bool:
        return (
            self.losses == other.losses
            and self.norms == other.norms
            and len(self.tensors) == len(other.tensors)
            and all(
                one.dtype == two.dtype and torch.equal(one, two)
                for one, two in zip(self.tensors, other.tensors, strict=True)
            )
        )


class Training:
    """A model, its optimizer and what a checkpoint has beside them, on one mesh."""

    def __init__(self, model: Any, mesh: DeviceMesh, *, group: int = 1) -> None:
        self.model, self.mesh = model, mesh
        self.optimizer = adam(model)
        self.steps = ElasticSteps(model, self.optimizer, seed=3, group=group, mesh=mesh)
        self.sampler = ElasticSampler(len(DATA), seed=5)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": self.optimizer,
            "steps": self.steps,
            "sampler": self.sampler,
        }

    def train(self, count: int, run: Run | None = None) -> Run:
        """Take some steps, and note them."""
        found = run or Run()
        for _ in range(count):
            with self.steps.step(DATA[self.sampler.next(BATCH)]) as parts:
                for part in parts:
                    self.steps.backward(loss_of(self.model, part))
                found.norms.append(self.steps.clip_grad_norm_(0.5))
                self.optimizer.step()
                self.optimizer.zero_grad()
            found.losses.append(self.steps.mean_loss())
        found.tensors = state_of(self.model, self.optimizer)
        return found


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all weights and the state of the optimizer, whole."""
    found = [*model.parameters()]
    for state in optimizer.state.values():
        found += [state[name] for name in sorted(state)]
    return [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for one in found
    ]


@contextmanager
def deterministic() -> Generator[None]:
    """Let torch use kernels that give the same bits whenever they run."""
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills
