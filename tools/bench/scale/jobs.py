"""Training jobs of any number of ranks, described by layouts alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.spec import TensorSpec, TensorSpecs
from dtckpt.dtensor import Layout, Mesh, Placement, Replicate, Shard

HIDDEN = 16_384
_FEED_FORWARD = 53_248
_KEYS = 1_024
_VOCABULARY = 128_256
_TENSOR_PARALLEL = 8
_STAGES = 8
_REPLICAS = 16

Kind = Literal["columns", "rows", "vector"]
Place = Callable[[Kind], tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter, and how tensor parallelism cuts it: by output columns, input rows, not."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int
    """Counted from 0; the embedding is at -1, what follows the layers at the number of layers."""


def transformer(num_weights: int) -> list[Weight]:
    """Return the parameters of a model of the largest open kind, as many layers as needed."""
    layers = -(-(num_weights - 3) // 9)
    ends = [
        Weight(name="embedding", shape=(_VOCABULARY, HIDDEN), kind="columns", layer=-1),
        Weight(name="norm", shape=(HIDDEN,), kind="vector", layer=layers),
        Weight(name="head", shape=(_VOCABULARY, HIDDEN), kind="columns", layer=layers),
    ]
    inner = itertools.chain.from_iterable(_layer(number) for number in range(layers))
    return ends + list(itertools.islice(inner, max(num_weights - 3, 0)))


def _layer(number: int) -> Iterator[Weight]:
    parts: list[tuple[str, tuple[int, ...], Kind]] = [
        ("attention_norm", (HIDDEN,), "vector"),
        ("attention.q", (HIDDEN, HIDDEN), "columns"),
        ("attention.k", (_KEYS, HIDDEN), "columns"),
        ("attention.v", (_KEYS, HIDDEN), "columns"),
        ("attention.out", (HIDDEN, HIDDEN), "rows"),
        ("mlp_norm", (HIDDEN,), "vector"),
        ("mlp.gate", (_FEED_FORWARD, HIDDEN), "columns"),
        ("mlp.up", (_FEED_FORWARD, HIDDEN), "columns"),
        ("mlp.down", (HIDDEN, _FEED_FORWARD), "rows"),
    ]
    for name, shape, kind in parts:
        yield Weight(name=f"layers.{number}.{name}", shape=shape, kind=kind, layer=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Ranks with the same tensors."""

    mesh: Mesh
    place: Place
    weights: tuple[Weight, ...]

    def describe(self) -> TensorSpecs:
        """Return what each of the ranks says it holds: every weight and its two moments."""
        specs: TensorSpecs = {}
        for prefix, code in _PARTS:
            for weight in self.weights:
                layout = Layout(self.mesh, self.place(weight.kind), weight.shape)
                specs[f"{prefix}/{weight.name}"] = TensorSpec(
                    dtype=DTYPES[code], shape=weight.shape, layout=layout
                )
        return specs


_PARTS = (("model", "BF16"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A way to spread a model over ranks."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(stage.mesh.size for stage in self.stages)

    def stage_of(self, rank: int) -> Stage:
        """Return the stage of a rank; all stages have as many."""
        return self.stages[rank * len(self.stages) // self.num_ranks]


def fsdp(ranks: int, weights: list[Weight]) -> Job:
    """Return a job in which every rank holds some rows of every tensor."""
    mesh = Mesh((ranks,), ("fsdp",))
    stage = Stage(mesh=mesh, place=lambda _: (Shard(0),), weights=tuple(weights))
    return Job(name="FSDP", stages=(stage,))


def hsdp(ranks: int, weights: list[Weight]) -> Job:
    """Return FSDP groups that are replicas of each other."""
    mesh = Mesh((_REPLICAS, ranks // _REPLICAS), ("replicate", "fsdp"))
    stage = Stage(mesh=mesh, place=lambda _: (Replicate(), Shard(0)), weights=tuple(weights))
    return Job(name=f"HSDP, {_REPLICAS} replicas", stages=(stage,))


def fsdp_tp(ranks: int, weights: list[Weight]) -> Job:
    """Return tensor parallelism inside FSDP."""
    stage = _fsdp_tp_stage(range(ranks), weights)
    return Job(name=f"FSDP x TP {_TENSOR_PARALLEL}", stages=(stage,))


def fsdp_tp_pp(ranks: int, weights: list[Weight]) -> Job:
    """Return pipeline stages of as many tensors, each with tensor parallelism inside FSDP."""
    ordered = sorted(weights, key=lambda weight: weight.layer)
    cuts = [len(ordered) * number // _STAGES for number in range(_STAGES + 1)]
    own = [ordered[start:end] for start, end in itertools.pairwise(cuts)]
    size = ranks // _STAGES
    stages = (
        _fsdp_tp_stage(range(number * size, (number + 1) * size), held)
        for number, held in enumerate(own)
    )
    return Job(name=f"FSDP x TP {_TENSOR_PARALLEL} x PP {_STAGES}", stages=tuple(stages))


def _fsdp_tp_stage(ranks: range, weights: list[Weight]) -> Stage:
    shape = (len(ranks) // _TENSOR_PARALLEL, _TENSOR_PARALLEL)
    if math.prod(shape) != len(ranks):
        raise ValueError(f"{len(ranks)} ranks cannot be divided by {_TENSOR_PARALLEL}")
    mesh = Mesh(shape, ("fsdp", "tp"), None if ranks.start == 0 else tuple(ranks))
    return Stage(mesh=mesh, place=_fsdp_tp_place, weights=tuple(weights))


def _fsdp_tp_place(kind: Kind) -> tuple[Placement, ...]:
    match kind:
        case "columns":
            return Shard(0, order=1), Shard(0, order=0)
        case "rows":
            return Shard(0), Shard(1)
        case "vector":
            return Shard(0), Replicate()


MIN_RANKS = _STAGES * _TENSOR_PARALLEL
"""All jobs need a multiple of it."""

JOBS: tuple[tuple[Callable[[int, list[Weight]], Job], Callable[[int, list[Weight]], Job]], ...] = (
    (fsdp, fsdp_tp),
    (hsdp, lambda ranks, weights: fsdp(ranks // 2, weights)),
    (fsdp_tp_pp, fsdp),
)
"""Jobs that save, each with the one that loads what it saved."""
