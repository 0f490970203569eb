"""Random operators: the same numbers on every mesh, state, checkpointing, dropout."""

# pyright: reportUnknownLambdaType=false
# One line per operator.

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Ragged,
    Replicate,
    Shard,
    random,
    strict,
)
from dtckpt.dtensor.random import draws
from dtckpt.errors import PlacementError, UnsupportedOp

from ...processes import run_processes
from ...ranks import RanksFailed
from ..rank_meshes import assert_holds, run_on_mesh, scattered

MESHES = [(1,), (4,), (2, 2)]

WHOLE = torch.arange(6, 26).div(32).view(5, 4)  # terms of a Partial add up to them exactly

OPS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("uniform_", lambda x: x.uniform_()),
    ("uniform_between", lambda x: x.uniform_(-2, 3)),
    ("normal_", lambda x: x.normal_()),
    ("normal_moved", lambda x: x.normal_(3, 2)),
    ("bernoulli_", lambda x: x.bernoulli_(0.3)),
    ("bernoulli_tensor_", lambda x: x.bernoulli_(x.clone())),
    ("random_", lambda x: x.random_()),
    ("random_to", lambda x: x.random_(10)),
    ("random_from_to", lambda x: x.random_(-3, 3)),
    ("random_from", lambda x: x.random_(5, None)),
    ("exponential_", lambda x: x.exponential_(2)),
    ("geometric_", lambda x: x.geometric_(0.2)),
    ("log_normal_", lambda x: x.log_normal_()),
    ("cauchy_", lambda x: x.cauchy_()),
    ("transposed", lambda x: x.t().uniform_()),
    ("rand_like", lambda x: torch.rand_like(x, dtype=torch.float64)),
    ("randn_like", lambda x: torch.randn_like(x, dtype=torch.complex64)),
    ("rand_like_complex", lambda x: torch.rand_like(x, dtype=torch.complex128)),
    ("randint_like", lambda x: torch.randint_like(x, 5, 90)),
    ("randint_like_high", lambda x: torch.randint_like(x, 90)),
    ("randint_like_tensor", lambda x: torch.randint_like(x, torch.tensor(90))),
    ("bernoulli", lambda x: torch.bernoulli(x)),
    ("bernoulli_p", lambda x: torch.bernoulli(x, 0.4)),
    ("normal_tensor_float", lambda x: torch.normal(x, 2)),
    ("normal_float_tensor", lambda x: torch.normal(2.0, x)),
    ("normal_tensor_tensor", lambda x: torch.normal(x, x)),
    ("normal_out", lambda x: torch.normal(x, x, out=torch.empty_like(x))),
    ("native_dropout", lambda x: torch.native_dropout(x, 0.5, True)[0]),
    ("native_dropout_off", lambda x: torch.native_dropout(x, 0.4, False)[0]),
    ("dropout", lambda x: F.dropout(x, 0.5)),
    ("dropout1d", lambda x: F.dropout1d(x.view(5, 2, 2), 0.5)),
    ("alpha_dropout", lambda x: F.alpha_dropout(x, 0.4, True)),
    ("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x.view(5, 2, 2), 0.4, True)),
    ("rrelu", lambda x: F.rrelu(x - 0.5, training=True)),
    ("rrelu_off", lambda x: F.rrelu(x - 0.5)),
    ("rrelu_", lambda x: F.rrelu_(x - 0.5, training=True)),
    ("gumbel_softmax", lambda x: F.gumbel_softmax(x)),
    ("normal_float64", lambda x: x.double().normal_()),
    ("normal_bfloat16", lambda x: x.bfloat16().normal_()),
    ("exponential_half", lambda x: x.half().exponential_()),
    ("random_wide", lambda x: x.long().random_(-(2**63), None)),
    ("random_uint8", lambda x: x.to(torch.uint8).random_()),
    ("dropout2d", lambda x: F.dropout2d(x.view(5, 2, 2, 1), 0.5)),
    ("feature_dropout", lambda x: torch.feature_dropout(x.view(5, 2, 2), 0.5, True)),
    ("attention", lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.5)),
    ("poisson", lambda x: torch.poisson(x * 10)),
    ("poisson_many", lambda x: torch.poisson(x * 40)),
    ("binomial", lambda x: torch.binomial(torch.full_like(x, 10), x)),
    ("binomial_many", lambda x: torch.binomial(torch.full_like(x, 90), x)),
    ("gamma", lambda x: torch.ops.aten._standard_gamma(x * 3)),
    ("dirichlet", lambda x: torch.ops.aten._sample_dirichlet(x * 3)),
    ("multinomial", lambda x: torch.multinomial(x, 3)),
    ("multinomial_replaced", lambda x: torch.multinomial(x, 9, True)),
    ("multinomial_turned", lambda x: torch.multinomial(x.t(), 3)),
]


def layouts(mesh: DeviceMesh) -> list[Any]:
    """Layouts of a tensor of shape (5, 4): uneven, empty and ragged shards, replicas, terms."""
    first = mesh.shape[0]
    ragged = Ragged(0, (5,) + (0,) * (first - 1))
    rest = [Replicate()] * (mesh.ndim - 1)
    return [
        [Replicate(), *rest],
        [Shard(0)] * mesh.ndim,
        [Shard(1), *rest],
        [ragged, *([Shard(1)] * (mesh.ndim - 1))],
        [Partial(), *rest],
    ]


def test_the_same_numbers_on_every_mesh_and_layout() -> None:
    def body(mesh: DeviceMesh) -> list[Tensor]:
        found: list[Tensor] = []
        for number, placements in enumerate(layouts(mesh)):
            random.manual_seed(11, mesh)
            for index, (name, op) in enumerate(OPS):
                with strict():
                    drawn = op(scattered(WHOLE, mesh, placements))
                whole = drawn.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
                if number == 0:
                    found.append(whole)
                text = f"{name} on {mesh.shape} with {placements}"
                _assert_same(name, whole, found[index], text)
        return found

    wanted: list[Tensor] | None = None
    for shape in MESHES:
        for found in run_on_mesh(shape, body):
            wanted = wanted or found
            for (name, _), a, b in zip(OPS, found, wanted, strict=True):
                _assert_same(name, a, b, name)


ROUNDED = {"gumbel_softmax", "attention", "dirichlet", "alpha_dropout", "feature_alpha_dropout"}
"""What sums over a dim that may be sharded, or multiplies the terms of a Partial one by one."""


def _assert_same(name: str, found: Tensor, wanted: Tensor, text: str) -> None:
    exact: dict[str, Any] = {} if name in ROUNDED else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, wanted, msg=lambda m: f"{text}: {m}", **exact)


def test_numbers_are_drawn_where_they_lie() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.zeros(5, 4)
        replicated = scattered(whole, mesh, [Replicate()]).uniform_()
        random.manual_seed(torch.initial_seed(), mesh)
        sharded = scattered(whole, mesh, [Shard(1)]).uniform_()
        assert sharded.placements == (Shard(1),)  # pyright: ignore[reportAttributeAccessIssue]
        assert_holds(sharded, replicated.to_local(), rtol=0, atol=0)  # pyright: ignore[reportAttributeAccessIssue]

    run_on_mesh((3,), body)


def test_every_draw_is_another_one() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.zeros(40), mesh, [Shard(0)])
        drawn = [tensor.uniform_().full_tensor().clone() for _ in range(3)]
        # Not torch's seed, which the mesh has taken: a test before this one may have set any.
        random.manual_seed(torch.initial_seed() ^ 1, mesh)
        drawn.append(tensor.uniform_().full_tensor())
        for i, a in enumerate(drawn):
            assert len(set(a.tolist())) == 40
            for b in drawn[:i]:
                assert not (a == b).any()

    run_on_mesh((2,), body)


def test_state_moves_between_meshes() -> None:
    def first(mesh: DeviceMesh) -> tuple[str, Tensor]:
        random.manual_seed(2**64 - 3, mesh)
        tensor = scattered(torch.zeros(7), mesh, [Shard(0)])
        tensor.normal_()
        state = json.dumps(random.get_rng_state(mesh))
        return state, tensor.normal_().full_tensor()

    state, wanted = run_on_mesh((2,), first)[0]
    assert json.loads(state) == {"seed": 2**64 - 3, "offset": 1}

    def second(mesh: DeviceMesh) -> None:
        random.set_rng_state(json.loads(state), mesh)
        drawn = scattered(torch.zeros(7), mesh, [Replicate(), Shard(0)]).normal_()
        torch.testing.assert_close(drawn.full_tensor(), wanted)
        assert random.get_rng_state(mesh)["offset"] == 2
        assert random.is_rng_supported_mesh(mesh)
        for wrong in ({"seed": 1}, {"seed": 1, "offset": 2**63}, {"seed": 2**64, "offset": 0}):
            with pytest.raises(PlacementError, match="not a state"):
                random.set_rng_state(wrong, mesh)
        with mesh:
            random.manual_seed(5)
            assert random.get_rng_state() == {"seed": 5, "offset": 0}

    run_on_mesh((2, 2), second)


def test_seeds_have_64_bits() -> None:
    def body(mesh: DeviceMesh) -> None:
        drawn: dict[int, tuple[float, ...]] = {}
        for seed in (0, 1, -1, 2**32, 2**63, -(2**63), 2**64 - 1, 1 + 2**40):
            random.manual_seed(seed, mesh)
            assert random.get_rng_state(mesh) == {"seed": seed % 2**64, "offset": 0}
            values = scattered(torch.zeros(4), mesh, [Shard(0)]).uniform_().full_tensor()
            drawn[seed] = tuple(values.tolist())
        assert drawn[-1] == drawn[2**64 - 1]
        assert drawn[2**63] == drawn[-(2**63)]
        assert len(set(drawn.values())) == 6
        for seed in (2**64, -(2**63) - 1, 1.5, True):
            with pytest.raises(PlacementError, match="64 bits"):
                random.manual_seed(seed, mesh)  # pyright: ignore[reportArgumentType]

    run_on_mesh((2,), body)


def test_an_unseeded_mesh_takes_the_seed_of_torch() -> None:
    def body(mesh: DeviceMesh) -> None:
        assert random.get_rng_state(mesh) == {"seed": torch.initial_seed(), "offset": 0}

    run_on_mesh((2,), body)


@pytest.mark.parametrize("only_one", [False, True])
def test_ranks_with_different_seeds_all_raise(only_one: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.zeros(4), mesh, [Replicate()])
        tensor.uniform_()
        fresh = DeviceMesh("cpu", mesh.layout_mesh, groups=mesh.get_all_groups())
        if not only_one or mesh.get_rank() == 1:
            random.manual_seed(mesh.get_rank(), fresh)
        scattered(torch.zeros(4), fresh, [Replicate()]).uniform_()

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((2,), body)
    assert sorted(failed.value.errors) == [0, 1]
    assert all("manual_seed" in str(error) for error in failed.value.errors.values())


REFUSED: list[tuple[str, Callable[[Tensor], Any], type[Exception]]] = [
    ("generator=", lambda x: x.uniform_(generator=torch.Generator()), UnsupportedOp),
    ("generator=", lambda x: torch.poisson(x, torch.Generator()), UnsupportedOp),
    ("each rank alone", lambda x: torch.rand(5, 4, out=x), UnsupportedOp),
    ("found from=3 > to=1", lambda x: x.uniform_(3, 1), RuntimeError),
    ("std >= 0", lambda x: x.normal_(0, -1), RuntimeError),
    ("std >= 0", lambda x: torch.normal(x, -1.0), RuntimeError),
    ("Int", lambda x: x.int().uniform_(), NotImplementedError),
    ("tensors of torch.int32", lambda x: torch.poisson(x.int()), UnsupportedOp),
]


def test_what_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        for text, op, kind in REFUSED:
            before = random.get_rng_state(mesh)
            with pytest.raises(kind, match=text):
                op(scattered(torch.ones(5, 4), mesh, [Shard(0)]))
            assert random.get_rng_state(mesh) == before

    run_on_mesh((2,), body)


def test_draws_into_a_view_that_was_copied_reach_the_tensor() -> None:
    def body(mesh: DeviceMesh) -> Tensor:
        random.manual_seed(3, mesh)
        tensor = scattered(torch.full((5, 4), 7.0), mesh, [Shard(0)])
        tensor.unfold(0, 2, 2).uniform_()
        return tensor.full_tensor()

    on_one, on_two, on_four = [run_on_mesh((size,), body)[0] for size in (1, 2, 4)]
    assert ((on_one[:4] >= 0) & (on_one[:4] < 1)).all()
    assert (on_one[4] == 7).all()
    assert torch.equal(on_one, on_two)
    assert torch.equal(on_one, on_four)


BY_VALUE: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("p_in", lambda x: torch.bernoulli(x - 2)),
    ("p_in", lambda x: torch.bernoulli(x + 2)),
    ("std >= 0", lambda x: torch.normal(x, x - 2)),
    ("rate", lambda x: torch.poisson(x - 2)),
    ("rate", lambda x: torch.poisson(x * torch.nan)),
    ("element < 0", lambda x: torch.multinomial(x - 2, 2)),
    ("element < 0", lambda x: torch.multinomial(x * torch.inf, 2)),
    ("sum of prob", lambda x: torch.multinomial(x * 0, 2, True)),
    ("n_sample > prob", lambda x: torch.multinomial(x, 5)),
    ("n_sample <= 0", lambda x: torch.multinomial(x, 0)),
    ("1 or 2 dim", lambda x: torch.multinomial(x[None], 1)),
]


def test_parameters_that_torch_refuses() -> None:
    def body(mesh: DeviceMesh) -> None:
        for text, op in BY_VALUE:
            with pytest.raises(RuntimeError, match=text):
                op(scattered(torch.ones(4, 4), mesh, [Shard(0)]))

    run_on_mesh((2,), body)


def test_ranges_of_integers() -> None:
    def body(mesh: DeviceMesh) -> None:
        for dtype, low, first, last in (
            (torch.float32, 5, 5, 2**24),
            (torch.bfloat16, 200, 200, 256),
            (torch.float64, -(2**63), -(2**63), 2**63),
            (torch.int8, -128, -128, 127),
            (torch.uint8, 0, 0, 255),
            (torch.bool, 0, 0, 1),
            (torch.int64, -(2**63), -(2**63), 2**63 - 1),
        ):
            tensor = scattered(torch.zeros(4000, dtype=torch.float64), mesh, [Shard(0)]).to(dtype)
            found = tensor.random_(low, None).full_tensor()
            span = last - first
            assert first <= found.min().item() <= first + span / 100
            assert last - span / 100 <= found.max().item() <= last

    run_on_mesh((2,), body)


def test_complex_numbers_have_two_parts() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.zeros(600), mesh, [Shard(0)])
        made = torch.rand_like(tensor, dtype=torch.complex64)
        for part in (torch.view_as_real(made).full_tensor()).unbind(-1):  # pyright: ignore[reportAttributeAccessIssue]
            assert 0 <= part.min().item() < 0.1
            assert 0.9 < part.max().item() < 1

    run_on_mesh((2,), body)


def test_dropout_and_its_gradient() -> None:
    def body(mesh: DeviceMesh) -> None:
        for placements in layouts(mesh):
            for drop in (F.dropout, lambda x, p: torch.native_dropout(x, p, True)[0]):
                tensor = scattered(WHOLE, mesh, placements).detach().requires_grad_()
                result: Any = drop(tensor, 0.5)
                result.sum().backward()
                assert tensor.grad is not None
                kept = result.full_tensor() != 0
                assert 0 < kept.sum().item() < 20
                torch.testing.assert_close(result.full_tensor(), WHOLE * kept * 2)
                assert_holds(tensor.grad, kept * 2.0)
        tensor = scattered(WHOLE, mesh, [Shard(0)] * 2)
        assert torch.equal(F.dropout(tensor, 0.5, training=False), tensor)
        assert not F.dropout(tensor, 1.0).any()

    run_on_mesh((2, 2), body)


def _noisy(tensor: Tensor) -> Tensor:
    hidden = F.dropout(tensor * 2, 0.5).sin()
    with torch.no_grad():
        noise = torch.rand_like(hidden)
    return (F.dropout(hidden, 0.5) * noise).sin()


def _gradient(mesh: DeviceMesh, run: Callable[[Tensor], Tensor]) -> Tensor:
    random.manual_seed(4, mesh)
    tensor = scattered(WHOLE, mesh, [Shard(0)]).detach().requires_grad_()
    results = [run(tensor), run(tensor)]
    sum(r.sum() for r in results).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert random.get_rng_state(mesh)["offset"] == 6
    assert isinstance(tensor.grad, DTensor)
    return tensor.grad.full_tensor()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_draws_again_what_it_drew(use_reentrant: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        again = _gradient(mesh, lambda x: checkpoint(_noisy, x, use_reentrant=use_reentrant))  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(again, _gradient(mesh, _noisy))

    run_on_mesh((1,), body)  # the ranks of a process share the generator that torch brings back


def test_activation_checkpointing_on_several_ranks() -> None:
    run_processes("tests.dtensor.random.random_ranks", 2)


def test_activation_checkpointing_with_contexts_of_our_own() -> None:
    def body(mesh: DeviceMesh) -> None:
        def run(tensor: Tensor) -> Tensor:
            found: Any = checkpoint(
                _noisy,
                tensor,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: random.replayed(mesh),
            )
            return found

        torch.testing.assert_close(_gradient(mesh, run), _gradient(mesh, _noisy))

    run_on_mesh((2,), body)


def test_activation_checkpointing_that_cannot_draw_again_raises() -> None:
    def body(mesh: DeviceMesh) -> None:
        with pytest.raises(PlacementError, match="preserve_rng_state"):
            _gradient(
                mesh,
                lambda x: checkpoint(_noisy, x, use_reentrant=False, preserve_rng_state=False),  # pyright: ignore[reportArgumentType]
            )

    run_on_mesh((2,), body)


def test_numbers_may_be_drawn_in_hooks() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, mesh, [Shard(0)]).detach().requires_grad_()
        tensor.register_hook(lambda grad: grad + torch.rand_like(grad))
        tensor.sum().backward()
        assert isinstance(tensor.grad, DTensor)
        assert ((tensor.grad.full_tensor() - 1.5).abs() <= 0.5).all()

    run_on_mesh((2,), body)


def test_draws_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_TICKETS", 4)

    def body(mesh: DeviceMesh) -> None:
        again = _gradient(mesh, lambda x: checkpoint(_noisy, x, use_reentrant=False))  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(again, _gradient(mesh, _noisy))

    with pytest.raises(RanksFailed, match="not known which numbers"):
        run_on_mesh((1,), body)


def test_large_and_strided_tensors() -> None:
    def body(mesh: DeviceMesh) -> list[Tensor]:
        found: list[Tensor] = []
        for placements in ([Shard(0)], [Shard(1)]):
            random.manual_seed(3, mesh)
            large = scattered(torch.zeros(300, 70), mesh, placements)
            turned = scattered(torch.zeros(9, 8), mesh, placements).t()
            found.append(large.normal_().full_tensor())
            found.append(turned.normal_().full_tensor())
            assert_holds(turned, found[1], rtol=0, atol=0)
        return found

    results = [found for shape in ((1,), (3,)) for found in run_on_mesh(shape, body)]
    for found in results:
        for i, tensor in enumerate(found):
            assert torch.equal(tensor, results[0][i % 2])


DRAWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.uniform_(-1, 2) if not x.is_complex() else torch.rand_like(x),
    lambda x: x.normal_(1, 2),
    lambda x: x.transpose(0, -1).normal_().transpose(0, -1),
    lambda x: x.exponential_() if not x.is_complex() else x,
    lambda x: x.log_normal_() if not x.is_complex() else x,
    lambda x: x.cauchy_() if not x.is_complex() else x,
    lambda x: x.geometric_(0.01) if not x.is_complex() else x,
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_odd_sizes_have_the_same_bits(dtype: str) -> None:
    # Vector code has another way for what is left at the end, which must not show.
    def body(mesh: DeviceMesh) -> list[Tensor]:
        found: list[Tensor] = []
        for shape in ((1,), (37,), (33_001,), (3, 130), (17, 2, 65)):
            random.manual_seed(8, mesh)
            placements = [Shard(len(shape) - 1), *[Shard(0)] * (mesh.ndim - 1)]
            tensor = scattered(torch.zeros(shape), mesh, placements).to(getattr(torch, dtype))
            found += [draw(tensor).full_tensor().clone() for draw in DRAWS]  # pyright: ignore[reportAttributeAccessIssue]
        return found

    wanted = run_on_mesh((1,), body)[0]
    for shape in ((3,), (2, 2)):
        for a, b in zip(run_on_mesh(shape, body)[0], wanted, strict=True):
            assert torch.equal(a, b)


def test_initialisers() -> None:
    def body(mesh: DeviceMesh) -> list[Tensor]:
        random.manual_seed(3, mesh)
        made: list[Tensor] = []
        for fill in (
            torch.nn.init.kaiming_uniform_,
            torch.nn.init.xavier_normal_,
            torch.nn.init.trunc_normal_,
        ):
            tensor = scattered(torch.zeros(9, 8), mesh, [Shard(0)])
            made.append(fill(torch.nn.Parameter(tensor)).full_tensor())  # pyright: ignore[reportAttributeAccessIssue]
        return made

    results = [*run_on_mesh((1,), body), *run_on_mesh((2,), body)]
    for found in results:
        for a, b in zip(found, results[0], strict=True):
            torch.testing.assert_close(a, b)
            assert a.std().item() > 0.1
