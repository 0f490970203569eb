"""A small GPT over bytes, and how torch's own parallelisms spread it over a mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model.

    Odd on purpose: 793 hidden units make two unequal tensor-parallel parts, and each half of six
    heads of 33 has 99 rows that no data-parallel pair shares evenly. Nor are 65 positions even.
    """

    vocabulary: int = 256
    context: int = 65
    width: int = 198
    heads: int = 6
    hidden: int = 793
    blocks: int = 3


class Attention(nn.Module):
    """Causal attention; works on the heads it has, be it all of them or a rank's share."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, positions, width) to the same shape."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, positions, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The language model: bytes in, the mean loss of every next byte out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean cross entropy of ``targets``, (rows, positions) like ``inputs``.

        ``places`` are the positions in a passage, all of them by default.
        """
        if places is None:
            places = torch.arange(inputs.shape[1])
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(seed: int, config: Config | None = None) -> GPT:
    """Return a model whose parameters depend on nothing but the seed and the sizes."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config or Config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" not in name:
                parameter.normal_(std=0.02, generator=generator)
    return model


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    """Spread a model over the axes of a mesh and return it: ``tp`` cuts layers, ``dp`` shards all.

    This is how training scripts of today do it: ``parallelize_module``, then ``fully_shard``.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], _outer_styles())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], _block_styles())
    if "dp" in names:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def _outer_styles() -> dict[str, ParallelStyle]:
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def _block_styles() -> dict[str, ParallelStyle]:
    return {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        # A local output would not tell "down" that the hidden units are 397 and 396.
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(input_layouts=Shard(-1)),
    }
