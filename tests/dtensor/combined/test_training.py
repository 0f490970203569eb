"""Each combination of parallelisms trains a GPT as one device does."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dtckpt.dtensor import Mesh
from tests.dtensor.rank_meshes import groups_over_several_axes, run_on_mesh

from .gpt import Kind
from .spreading import Spread
from .training import Recipe, Told, train, train_alone

TP2, TP3 = Spread(mesh="tp=2"), Spread(mesh="tp=3")
SP1, SP2, SP3 = (Spread(mesh=f"tp={size}", is_sequence=True) for size in (1, 2, 3))
FSDP2, FSDP3, FSDP4 = (Spread(mesh=f"dp={size}") for size in (2, 3, 4))
HSDP = Spread(mesh="rep=2,dp=2")
FSDP_TP = Spread(mesh="dp=2,tp=2")
FSDP_SP = Spread(mesh="dp=2,tp=2", is_sequence=True)
HSDP_TP = Spread(mesh="rep=2,dp=2,tp=2")
FSDP_CP = Spread(mesh="dp=2,cp=2")
CP_TP = Spread(mesh="dp=1,cp=2,tp=2")
FSDP_CP_SP = Spread(mesh="dp=2,cp=2,tp=2", is_sequence=True)

TIED = Recipe(name="tied", kind=Kind(is_tied=True), max_norm=0.5)
DROPOUT = Recipe(name="dropout", kind=Kind(dropout=0.3, is_tied=True))
REMADE = Recipe(name="dropout made anew", kind=Kind(dropout=0.3, remakes=False))
FROZEN = Recipe(
    name="frozen, accumulated, made anew by a reentrant pass",
    kind=Kind(blocks=2, is_frozen=True, is_tied=True, remakes=True),
    max_norm=0.5,
    accumulates=2,
)
MOMENTUM = Recipe(name="momentum", is_adam=False, foreach=False, max_norm=0.1, accumulates=2)
SCALED = Recipe(name="scaled", kind=Kind(dropout=0.3), scales=True, max_norm=0.5, steps=3)
SINGLE = Recipe(name="float32", kind=Kind(is_tied=True), max_norm=0.5, dtype=torch.float32)

CASES = [
    *((spread, TIED) for spread in (SP1, SP3, FSDP3, HSDP_TP, CP_TP)),
    *((spread, DROPOUT) for spread in (TP3, FSDP4, FSDP_CP)),
    *((spread, REMADE) for spread in (HSDP, FSDP_SP)),
    *((spread, FROZEN) for spread in (TP2, FSDP_SP)),
    *((spread, MOMENTUM) for spread in (SP2, FSDP_TP)),
    *((spread, SCALED) for spread in (HSDP, FSDP_CP_SP)),
    *((spread, SINGLE) for spread in (FSDP2, FSDP_TP)),
]

alone = cache(train_alone)


def told_by(spread: Spread, recipe: Recipe) -> Told:
    """Train on the ranks of a mesh: what all of them tell, and the losses of the whole batch."""
    mesh = Mesh.parse(spread.mesh)
    with groups_over_several_axes():
        found = run_on_mesh(mesh.shape, lambda on: train(recipe, spread, on), mesh.axis_names)
    first = found[0]
    for other in found[1:]:
        assert other.numbers == first.numbers
        for name, tensor in first.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    for name in ("losses", "tested"):
        rows = zip(*(getattr(told, name) for told in found), strict=True)
        setattr(first, name, [sum(row) / len(row) for row in rows])
    return first


def assert_alike(found: Told, wanted: Told, *, rtol: float, atol: float) -> None:
    def same(name: str, one: object, other: object) -> None:
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda told: f"{name}: {told}"
        )

    for name in ("losses", "tested", "numbers"):
        same(name, getattr(found, name), getattr(wanted, name))
    assert list(found.tensors) == list(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        same(name, found.tensors[name], tensor)


@pytest.mark.parametrize(("spread", "recipe"), CASES, ids=str)
def test_training_is_that_of_one_device(spread: Spread, recipe: Recipe) -> None:
    """Up to the order of summation, which parts of rows, heads and classes change."""
    rtol, atol = (1e-12, 1e-13) if recipe.dtype is torch.float64 else (1e-4, 1e-5)
    found = told_by(spread, recipe)
    assert_alike(found, alone(recipe), rtol=rtol, atol=atol)
    if recipe.scales:  # the step with an infinite gradient on some ranks was made by none
        norms, scales = found.numbers[0::3], found.numbers[1::3]
        assert norms[1] == torch.inf
        assert scales == [1024.0, 512.0, 512.0]
        assert found.tested[0] == found.tested[1] != found.tested[2]


@pytest.mark.parametrize(
    ("spread", "computes_in"),
    [(FSDP2, None), (HSDP, None), (FSDP4, torch.bfloat16), (HSDP, torch.bfloat16)],
    ids=str,
)
def test_the_same_batch_on_all_ranks_gives_the_same_bits(
    spread: Spread, computes_in: torch.dtype | None
) -> None:
    """Gathered parameters are those of one device, and the mean of 2 or 4 equal terms is exact."""
    recipe = Recipe(
        name="alike",
        kind=Kind(blocks=2, dropout=0.3, is_tied=True, is_frozen=True, remakes=False),
        repeats=True,
        accumulates=2,
        computes_in=computes_in,
        dtype=torch.float32,
    )
    assert_alike(told_by(spread, recipe), alone(recipe), rtol=0, atol=0)


def test_one_rank_gives_the_same_bits() -> None:
    for mesh in ("tp=1", "dp=1", "rep=1,dp=1,tp=1"):
        assert_alike(told_by(Spread(mesh=mesh), DROPOUT), alone(DROPOUT), rtol=0, atol=0)
