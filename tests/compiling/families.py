"""Models by family, of sizes that ranks share evenly or unevenly, or of which some get nothing."""

# pyright: reportPrivateUsage=false
# Chooses the kernels of experts as transformers does when it makes a configuration from a file.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtckpt.dtensor import Replicate, Shard, distribute_tensor
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

PARTS = ("even", "uneven", "empty")

Treat = Callable[[nn.Module, Any], None]


def size_of(parts: str, ranks: int) -> int:
    """Return a size that so many ranks share in such parts."""
    return {"even": 2 * ranks, "uneven": 2 * ranks - 1, "empty": ranks - 1}[parts]


@dataclass(frozen=True, slots=True)
class Model:
    """A model on one device, its inputs there, and how both are distributed."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    treat: Treat
    dims: tuple[int | None, ...]
    """The dim along which each input is sharded; -1 for replicated, None for a plain tensor."""
    context: Callable[[], Any] | None = None
    """What is entered around both passes."""
    draws: bool = False
    """Whether it draws random numbers, other ones than on one device."""


def by_rows(*patterns: str) -> Treat:
    """Return what shards parameters along their first dim, all or those with a name's end."""

    def treat(module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters()):
            path, _, own = name.rpartition(".")
            shards = not patterns or name.endswith(patterns)
            placement = Shard(0) if shards else Replicate()
            made = distribute_tensor(parameter.detach(), mesh, [placement])
            setattr(module.get_submodule(path), own, nn.Parameter(made))
        for name, buffer in list(module.named_buffers()):
            path, _, own = name.rpartition(".")
            setattr(module.get_submodule(path), own, distribute_tensor(buffer, mesh))

    return treat


def by_plan(plan: dict[str, Any]) -> Treat:
    """Return what applies styles to modules, and replicates what is left."""

    def treat(module: nn.Module, mesh: Any) -> None:
        parallelize_module(module, mesh, plan)

    return treat


def numbers(*shape: int) -> Tensor:
    """Return numbers that do not repeat."""
    return torch.linspace(-2, 3, int(torch.Size(shape).numel())).sin().view(shape)


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def mlp(n: int) -> Model:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return Model(Mlp(n), (numbers(3, 6),), by_plan(plan), (None,))


def mlp_rows(n: int) -> Model:
    return Model(nn.Sequential(Mlp(n), nn.LayerNorm(6), Mlp(n)), (numbers(n, 6),), by_rows(), (0,))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        other = x if y is None else y
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, other), (self.v, other))
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=y is None)
        return self.o(found.transpose(1, 2).flatten(2))


def attention(n: int) -> Model:
    return Model(Attention(8, 2), (numbers(n, 5, 8),), by_rows(), (0,))


def attention_over_sequence(n: int) -> Model:
    return Model(Attention(8, 2), (numbers(2, n, 8),), by_rows(), (1,))


def attention_heads(n: int) -> Model:
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
    plan["o"] = RowwiseParallel()
    return Model(Attention(4 * n, n), (numbers(2, 5, 4 * n),), by_plan(plan), (None,))


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(8, 2), Attention(8, 2)
        self.norm, self.other = nn.RMSNorm(8), nn.RMSNorm(8)
        self.bias = nn.Embedding(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.own(self.norm(x))
        return x + self.cross(self.other(x), y)


def cross_attention(n: int) -> Model:
    return Model(Cross(), (numbers(n, 4, 8), numbers(n, 3, 8)), by_rows(), (0, 0))


def llama(n: int) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = _config(
        LlamaConfig,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8 * n,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return _language(LlamaForCausalLM(config), n)


def mixtral(n: int) -> Model:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = _config(
        MixtralConfig,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        num_local_experts=2 * n,
        num_experts_per_tok=1 if n == 1 else 2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    config._experts_implementation = "batched_mm"
    return _language(MixtralForCausalLM(config), n)


def _config(kind: Any, **settings: Any) -> Any:
    return kind(**settings)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def _language(model: nn.Module, n: int) -> Model:
    tokens = torch.arange(n * 6).view(n, 6).mul(7).remainder(32)
    return Model(Logits(model.eval()), (tokens,), by_rows(), (0,))


class Gpt(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.attention, self.mlp = Attention(width, 2), Mlp2(width)
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(places)
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.second(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Mlp2(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _tokens(n: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.arange(n * 5).view(n, 5).mul(7).remainder(words)
    return tokens, torch.arange(5).expand(n, 5).contiguous(), (tokens * 3 + 1).remainder(words)


def gpt(n: int) -> Model:
    return Model(Gpt(3 * n + 1, 8), _tokens(n, 3 * n + 1), by_rows(), (0, 0, 0))


def gpt_loss_parallel(n: int) -> Model:
    words = 2 * n + 1
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "places": RowwiseParallel(input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),
    }
    return Model(Gpt(words, 8), _tokens(2, words), by_plan(plan), (None,) * 3, loss_parallel)


class Cnn(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.group = nn.Conv2d(channels, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = self.group(self.second(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def cnn(n: int) -> Model:
    return Model(Cnn(n), (numbers(4, 3, 8, 8),), by_rows("weight"), (-1,))


def cnn_batch(n: int) -> Model:
    return Model(Cnn(3), (numbers(n, 3, 8, 8),), by_rows("weight"), (0,))


def conv1d(n: int) -> Model:
    module = nn.Sequential(nn.Conv1d(3, n, 3, padding=1), nn.GELU(), nn.Conv1d(n, n + 1, 3))
    return Model(module, (numbers(2, 3, 9),), by_rows(), (-1,))


class Lstm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cell, self.gru = nn.LSTMCell(4, hidden), nn.GRUCell(hidden, hidden)
        self.rnn, self.head = nn.RNNCell(hidden, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        g = r = h
        for step in range(3):
            h, c = self.cell(x.select(1, step), (h, c))
            g = self.gru(h, g)
            r = self.rnn(g, r)
        return self.head(r)


def recurrent(n: int) -> Model:
    state = (numbers(4, n), numbers(4, n).cos())
    return Model(Lstm(n), (numbers(4, 3, 4), *state), by_rows(), (-1, -1, -1))


def recurrent_batch(n: int) -> Model:
    state = (numbers(n, 5), numbers(n, 5).cos())
    return Model(Lstm(5), (numbers(n, 3, 4), *state), by_rows(), (0, 0, 0))


class Bag(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(words, 6, mode="mean"), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens)).log_softmax(-1)


def embedding_bag(n: int) -> Model:
    tokens = torch.arange(n * 4).view(n, 4).mul(5).remainder(n + 1)
    return Model(Bag(n + 1), (tokens,), by_rows(), (0,))


def encoder(n: int) -> Model:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Model(layer, (numbers(n, 5, 8),), by_rows(), (0,))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token, self.places = nn.Parameter(numbers(1, 1, 8)), nn.Parameter(numbers(1, 5, 8))
        self.attention, self.norm = Attention(8, 2), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(x + self.attention(x))[:, 0])


def vit(n: int) -> Model:
    return Model(Vit(), (numbers(n, 3, 8, 8),), by_rows("weight", "bias"), (0,))


class Unet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.middle = (
            nn.Conv2d(3, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, 2, 1),
        )
        self.up = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        down = F.silu(self.down(x))
        middle = F.silu(self.middle(down))
        up = F.interpolate(middle, scale_factor=2.0, mode="nearest")
        return self.up(torch.cat([down, up], 1))


def unet(n: int) -> Model:
    return Model(Unet(n), (numbers(2, 3, 8, 8),), by_rows(), (-1,))


def unet_batch(n: int) -> Model:
    return Model(Unet(3), (numbers(n, 3, 8, 8),), by_rows(), (0,))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(6), nn.Dropout(0.25)
        self.mlp, self.last = Mlp(8), nn.RMSNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.mlp(self.dropout(self.norm(x))))


def sequence_parallel(n: int) -> Model:
    shard = Shard(1)
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "dropout": SequenceParallel(),
        "last": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=shard, use_local_output=False),
    }
    return Model(Sequence(), (numbers(2, n, 6),), by_plan(plan), (1,), draws=True)


def sharded(n: int) -> Model:
    def treat(module: nn.Module, mesh: Any) -> None:
        for child in module.children():
            fully_shard(child, mesh=mesh)

    return Model(nn.Sequential(Mlp(n), nn.LayerNorm(6), Mlp(3)), (numbers(3, 6),), treat, (None,))


FAMILIES: dict[str, Callable[[int], Model]] = {
    make.__name__: make
    for make in (
        mlp,
        mlp_rows,
        attention,
        attention_over_sequence,
        attention_heads,
        cross_attention,
        llama,
        mixtral,
        gpt,
        gpt_loss_parallel,
        cnn,
        cnn_batch,
        conv1d,
        recurrent,
        recurrent_batch,
        embedding_bag,
        encoder,
        vit,
        unet,
        unet_batch,
        sequence_parallel,
        sharded,
    )
}
