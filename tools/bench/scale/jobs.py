"""Training jobs of any number of ranks, described by layouts alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dtckpt.checkpoint.saving.outlines import Outline, mesh_text
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
Place = Callable[[Kind], tuple[int, tuple[Placement, ...]] | None]
"""Which mesh of a rank a weight lies on, and how; None for plain tensors."""


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
    """Ranks with the same tensors, be it on sibling meshes."""

    ranks: range
    meshes: Callable[[int], tuple[Mesh, ...]]
    """The meshes that a rank knows, in the order in which its tensors come to lie on them."""
    place: Place
    weights: tuple[Weight, ...]

    def describe(self, rank: int) -> TensorSpecs:
        """Return what a rank says it holds: every weight and its two moments."""
        specs: TensorSpecs = {}
        meshes = self.meshes(rank)
        for prefix, code in _PARTS:
            for weight in self.weights:
                found = self.place(weight.kind)
                layout = found and Layout(meshes[found[0]], found[1], weight.shape)
                specs[f"{prefix}/{weight.name}"] = TensorSpec(
                    dtype=DTYPES[code], shape=weight.shape, layout=layout
                )
        return specs

    def outlines(self) -> Iterator[tuple[int, Outline]]:
        """Yield what each rank says, in two parts, of which one is the same on all."""
        first = Outline.of(self.describe(self.ranks[0]))
        told: dict[Mesh, str] = {}
        for rank in self.ranks:
            meshes = self.meshes(rank)
            for mesh in meshes:
                if mesh not in told:
                    told[mesh] = mesh_text(mesh)
            yield rank, replace(first, meshes=tuple(told[mesh] for mesh in meshes))


_PARTS = (("model", "BF16"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A way to spread a model over ranks."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(len(stage.ranks) for stage in self.stages)

    def stage_of(self, rank: int) -> Stage:
        """Return the stage of a rank; all stages have as many."""
        return self.stages[rank * len(self.stages) // self.num_ranks]

    def describe(self, rank: int) -> TensorSpecs:
        """Return what a rank says it holds."""
        return self.stage_of(rank).describe(rank)


def _on_one_mesh(mesh: Mesh, place: Place, weights: Iterable[Weight]) -> Stage:
    ranks = mesh.all_ranks()
    return Stage(
        ranks=range(ranks[0], ranks[-1] + 1),
        meshes=lambda _: (mesh,),
        place=place,
        weights=tuple(weights),
    )


def ddp(ranks: int, weights: list[Weight]) -> Job:
    """Return a job in which every rank holds every tensor, and knows no mesh."""
    stage = Stage(
        ranks=range(ranks), meshes=lambda _: (), place=lambda _: None, weights=tuple(weights)
    )
    return Job(name="DDP", stages=(stage,))


def fsdp(ranks: int, weights: list[Weight]) -> Job:
    """Return a job in which every rank holds some rows of every tensor."""
    stage = _on_one_mesh(Mesh((ranks,), ("fsdp",)), lambda _: (0, (Shard(0),)), weights)
    return Job(name="FSDP", stages=(stage,))


def hsdp(ranks: int, weights: list[Weight]) -> Job:
    """Return FSDP groups that are replicas of each other."""
    mesh = Mesh((_REPLICAS, ranks // _REPLICAS), ("replicate", "fsdp"))
    stage = _on_one_mesh(mesh, lambda _: (0, (Replicate(), Shard(0))), weights)
    return Job(name=f"HSDP, {_REPLICAS} replicas", stages=(stage,))


def hsdp_joined(ranks: int, weights: list[Weight]) -> Job:
    """Return the same where each replica knows the mesh of its own ranks alone."""
    lines = _lines(range(ranks), ranks // _REPLICAS)
    stage = Stage(
        ranks=range(ranks),
        meshes=lambda rank: (lines[rank // (ranks // _REPLICAS)],),
        place=lambda _: (0, (Shard(0),)),
        weights=tuple(weights),
    )
    return Job(name=f"HSDP, {_REPLICAS} joined copies", stages=(stage,))


def siblings(ranks: int, weights: list[Weight]) -> Job:
    """Return tensor parallel groups that are copies of each other.

    The data axis shards vectors alone. Each rank knows two meshes, which no other rank has both.
    """
    return Job(name=f"DP x TP {_TENSOR_PARALLEL}, siblings", stages=(_siblings(ranks, 0, weights),))


def siblings_pp(ranks: int, weights: list[Weight]) -> Job:
    """Return pipeline stages of such groups."""
    size = ranks // _STAGES
    stages = (_siblings(size, n * size, own) for n, own in enumerate(_by_stage(weights)))
    return Job(name=f"DP x TP {_TENSOR_PARALLEL} x PP {_STAGES}, siblings", stages=tuple(stages))


def _siblings(num_ranks: int, first: int, weights: Iterable[Weight]) -> Stage:
    ranks = range(first, first + num_ranks)
    groups = _lines(ranks, _TENSOR_PARALLEL)
    lines = [
        Mesh((num_ranks // _TENSOR_PARALLEL,), ("dp",), tuple(ranks[at::_TENSOR_PARALLEL]))
        for at in range(_TENSOR_PARALLEL)
    ]

    ordered = sorted(weights, key=lambda weight: weight.kind == "vector")
    has_group, has_line = ordered[0].kind != "vector", ordered[-1].kind == "vector"

    def meshes(rank: int) -> tuple[Mesh, ...]:
        group, at = divmod(rank - first, _TENSOR_PARALLEL)
        return (groups[group],) * has_group + (lines[at],) * has_line

    def place(kind: Kind) -> tuple[int, tuple[Placement, ...]]:
        if kind == "vector":
            return int(has_group), (Shard(0),)
        return 0, (Shard(0 if kind == "columns" else 1),)

    return Stage(ranks=ranks, meshes=meshes, place=place, weights=tuple(ordered))


def _lines(ranks: range, size: int) -> list[Mesh]:
    return [
        Mesh((size,), ("line",), tuple(ranks[start : start + size]))
        for start in range(0, len(ranks), size)
    ]


def fsdp_tp(ranks: int, weights: list[Weight]) -> Job:
    """Return tensor parallelism inside FSDP."""
    stage = _fsdp_tp_stage(range(ranks), weights)
    return Job(name=f"FSDP x TP {_TENSOR_PARALLEL}", stages=(stage,))


def fsdp_tp_pp(ranks: int, weights: list[Weight]) -> Job:
    """Return pipeline stages of as many tensors, each with tensor parallelism inside FSDP."""
    size = ranks // _STAGES
    stages = (
        _fsdp_tp_stage(range(number * size, (number + 1) * size), held)
        for number, held in enumerate(_by_stage(weights))
    )
    return Job(name=f"FSDP x TP {_TENSOR_PARALLEL} x PP {_STAGES}", stages=tuple(stages))


def _by_stage(weights: list[Weight]) -> list[list[Weight]]:
    ordered = sorted(weights, key=lambda weight: weight.layer)
    cuts = [len(ordered) * number // _STAGES for number in range(_STAGES + 1)]
    return [ordered[start:end] for start, end in itertools.pairwise(cuts)]


def _fsdp_tp_stage(ranks: range, weights: list[Weight]) -> Stage:
    shape = (len(ranks) // _TENSOR_PARALLEL, _TENSOR_PARALLEL)
    if math.prod(shape) != len(ranks):
        raise ValueError(f"{len(ranks)} ranks cannot be divided by {_TENSOR_PARALLEL}")
    return _on_one_mesh(Mesh(shape, ("fsdp", "tp"), tuple(ranks)), _fsdp_tp_place, weights)


def _fsdp_tp_place(kind: Kind) -> tuple[int, tuple[Placement, ...]]:
    match kind:
        case "columns":
            return 0, (Shard(0, order=1), Shard(0, order=0))
        case "rows":
            return 0, (Shard(0), Shard(1))
        case "vector":
            return 0, (Shard(0), Replicate())


MIN_RANKS = _STAGES * _TENSOR_PARALLEL
"""All jobs need a multiple of it."""

JOBS: tuple[tuple[Callable[[int, list[Weight]], Job], Callable[[int, list[Weight]], Job]], ...] = (
    (fsdp, fsdp_tp),
    (hsdp, lambda ranks, weights: fsdp(ranks // 2, weights)),
    (fsdp_tp_pp, fsdp),
    (ddp, fsdp),
    (hsdp_joined, fsdp),
    (siblings, fsdp_tp),
    (siblings_pp, fsdp),
)
"""Jobs that save, each with the one that loads what it saved."""
