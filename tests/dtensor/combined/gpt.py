"""A small GPT of the demo's attention, with what models of today have: ties, dropout, buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DeviceMesh, DTensor
from dtckpt.dtensor.random import replayed
from tools.demo.model import GPT, Config
from tools.demo.model import Block as PlainBlock

# Sizes that neither two nor three ranks share evenly.
CONFIG = Config(vocabulary=11, context=7, width=12, heads=4, hidden=7)
ROWS = 5
"""Of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a model has beside its layers."""

    blocks: int = 1
    dropout: float = 0.0
    is_tied: bool = False
    is_frozen: bool = False
    """Whether the first block and the positions are not trained."""
    remakes: bool | None = None
    """Whether activations are made anew in the backward pass: reentrant or not; None if not."""


class Dropout(nn.Module):
    """Dropout whose mask depends on the place of an element in the whole batch alone."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.mesh: DeviceMesh | None = None
        """All ranks that have a part of the batch; set once the model is spread."""
        self.placements: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, positions, width) to the same shape."""
        if not self.p or not self.training:
            return x
        assert self.mesh is not None
        local = x.to_local() if isinstance(x, DTensor) else x
        shape = (ROWS, CONFIG.context, CONFIG.width)
        whole = DTensor.from_local(local, self.mesh, self.placements, shape=shape)
        made = cast(DTensor, F.dropout(whole, self.p)).to_local()
        if not isinstance(x, DTensor):
            return made
        return DTensor.from_local(made, x.device_mesh, x.placements, shape=x.shape)


class Block(PlainBlock):
    """A block of the demo with dropout behind both parts."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(CONFIG)
        self.drop1 = Dropout(kind.dropout)
        self.drop2 = Dropout(kind.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, positions, width) to the same shape."""
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(GPT):
    """The model of the demo, in which logits come out."""

    seen: Tensor

    def __init__(self, kind: Kind) -> None:
        super().__init__(replace(CONFIG, blocks=0))
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind) for _ in range(kind.blocks))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if kind.is_tied:
            self.head.weight = self.tokens.weight
        if kind.is_frozen:
            self.blocks[0].requires_grad_(False)
            self.positions.requires_grad_(False)

    def forward(self, inputs: Tensor, places: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return logits, (rows, positions, vocabulary), of inputs at places."""
        if self.training:
            self.seen += 1
        x = self.tokens(inputs) + self.positions(places)
        for block in cast("list[Block]", self.blocks):
            remakes = self.training and self.kind.remakes is not None
            x = self.remade(block, x) if remakes else block(x)
        return self.head(self.norm(x))

    def remade(self, block: Block, x: Tensor) -> Tensor:
        """Return what a block does, of which nothing is kept."""
        mesh = block.drop1.mesh
        if self.kind.remakes:
            return cast(Tensor, checkpoint(block, x, use_reentrant=True))
        # The ranks of a test are threads, which have one generator of torch.
        again: dict[str, Any] = {"context_fn": lambda: replayed(mesh)}
        return cast(Tensor, checkpoint(block, x, use_reentrant=False, **again))


def make_gpt(kind: Kind, dtype: torch.dtype) -> Gpt:
    """Return a model whose parameters are the same in every process and thread."""
    generator = torch.Generator().manual_seed(3)
    model = Gpt(kind).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * values)
    return model
