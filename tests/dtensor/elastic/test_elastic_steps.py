"""Steps give the same bits on every mesh, and go on from one to another."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, HeadTail, Mesh, PlacementError, Ragged, Replicate, Shard
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.elastic import ElasticSampler, ElasticSteps
from dtckpt.dtensor.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from tests.dtensor.rank_meshes import rank_mesh, run_on_mesh, scattered
from tests.ranks import run_ranks

from .training import BATCH, DATA, Run, Training, adam, deterministic, loss_of, made, spread
from .training import state_of as whole_state

_c10d: Any = dist
STEPS = 3


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    with deterministic():
        yield


def alone(start: nn.Module, steps: int = STEPS, group: int = 1) -> Run:
    return Training(copy.deepcopy(start), alone_mesh(), group=group).train(steps)


def alone_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", Mesh((1,)), rank=0)


@cache
def expected(steps: int = STEPS) -> Run:
    return alone(made(), steps)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *(("sharded", shape) for shape in [(1,), (4,), (5,), (2, 2)]),
        *(("replicated", shape) for shape in [(5,), (2, 2)]),
        ("plain", (3,)),
    ],
)
def test_bits_are_those_of_one_rank(shape: tuple[int, ...], kind: str) -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        assert Training(spread(start, mesh, kind), mesh).train(STEPS).equals(expected())

    run_on_mesh(shape, body)


def test_bits_are_those_of_a_loop_in_plain_torch() -> None:
    start = made()
    model = copy.deepcopy(start)
    optimizer = adam(model)
    sampler = ElasticSampler(len(DATA), seed=5)
    for _ in range(STEPS):
        for number in sampler.next(BATCH).tolist():
            loss_of(model, DATA[number : number + 1].clone()).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= BATCH
        optimizer.step()
        optimizer.zero_grad()
    wanted = whole_state(model, optimizer)

    def body(mesh: DeviceMesh) -> None:
        training = Training(spread(start, mesh, "sharded"), mesh)
        for _ in range(STEPS):
            with training.steps.step(DATA[training.sampler.next(BATCH)]) as parts:
                for part in parts:
                    training.steps.backward(loss_of(training.model, part))
                training.optimizer.step()
                training.optimizer.zero_grad()
        found = whole_state(training.model, training.optimizer)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))

    run_on_mesh((3,), body)


def test_ordinary_steps_differ() -> None:
    """Else the other tests would show nothing."""
    start = made()

    def body(mesh: DeviceMesh) -> list[Tensor]:
        model = spread(start, mesh, "sharded")
        optimizer = adam(model)
        sampler = ElasticSampler(len(DATA), seed=5)
        for _ in range(STEPS):
            batch = DATA[sampler.next(BATCH)].chunk(mesh.size())[mesh.get_local_rank()]
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_state(model, optimizer)

    two, four = (run_on_mesh((size,), body)[0] for size in (2, 4))
    assert not all(torch.equal(one, other) for one, other in zip(two, four, strict=True))


def resumed(
    shape: tuple[int, ...], steps: int, kind: str, before: Run, source: Path | None, target: Path
) -> Run:
    """Go on after ``before`` from a checkpoint, on a mesh of threads; return what there is then."""
    start, store = made(), _c10d.HashStore()

    def body(rank: int, world: Any) -> Run:
        mesh = rank_mesh(store, shape, rank, world)
        training = Training(spread(start, mesh, kind), mesh)
        if source is not None:
            ckpt.load(training.state, source, process_group=world)
        found = training.train(steps, copy.deepcopy(before))
        ckpt.save(training.state, target, process_group=world)
        return found

    runs = run_ranks(Mesh(shape).size, body)
    assert all(one.equals(runs[0]) for one in runs)
    return runs[0]


def test_a_training_goes_on_where_another_mesh_was(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    run = resumed((4,), 1, "sharded", Run(), None, one)
    run = resumed((2, 1), 1, "sharded", run, one, two)
    run = resumed((3,), 1, "replicated", run, two, three)
    assert run.equals(expected())


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16])
def test_mixed_precision(reduced: torch.dtype | None) -> None:
    start = made()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)

    def body(mesh: DeviceMesh) -> Run:
        return Training(spread(start, mesh, "sharded", mp_policy=policy), mesh).train(2)

    wanted = run_on_mesh((1,), body)[0]
    assert not wanted.equals(expected(2))
    for shape in [(3,), (1, 2)]:
        assert all(one.equals(wanted) for one in run_on_mesh(shape, body))


def test_groups_of_several_elements_and_gradients_that_wait() -> None:
    start = made()
    wanted = alone(start, 2, group=3)
    assert not wanted.equals(expected(2))

    def body(mesh: DeviceMesh) -> None:
        model = spread(start, mesh, "sharded", reshard_after_forward=mesh.size() == 2)
        model.set_requires_gradient_sync(mesh.size() == 2)
        assert Training(model, mesh, group=3).train(2).equals(wanted)

    for size in (2, 3):
        run_on_mesh((size,), body)


def test_several_axes_that_shard_and_modules_that_go_together() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        dims = DataParallelMeshDims(shard=("b", "a"), replicate="c")
        fully_shard([*model.blocks], mesh=mesh, dp_mesh_dims=dims)
        fully_shard(
            model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda p: Shard(p.ndim - 1)
        )
        training = Training(model, mesh["c", "b", "a"])
        assert training.train(STEPS).equals(expected())

    run_on_mesh((2, 1, 2), body, ("a", "b", "c"))


@pytest.mark.parametrize(
    "placements",
    [[Shard(0)], [Shard(1)], [Replicate()], [Ragged(0, (0, 11, 1))], [HeadTail(0)]],
)
def test_batches_may_lie_anyhow(placements: Any) -> None:
    start = made()
    batch = DATA[:BATCH]

    def losses(mesh: DeviceMesh, whole: Any) -> float:
        training = Training(copy.deepcopy(start), mesh)
        with training.steps.step(whole, torch.arange(BATCH)) as parts:
            for part, number in parts:
                assert torch.equal(part, batch[number])
                training.steps.backward(loss_of(training.model, part))
        return training.steps.mean_loss()

    wanted = losses(alone_mesh(), batch)

    def body(mesh: DeviceMesh) -> None:
        assert losses(mesh, scattered(batch, mesh, placements)) == wanted

    run_on_mesh((3,), body)


def test_ranks_without_a_group_only_take_part() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> list[Tensor]:
        training = Training(spread(start, mesh, "sharded"), mesh)
        with training.steps.step(DATA[:2]) as parts:
            assert len(parts) == max(1, 2 // mesh.size())
            for part in parts:
                training.steps.backward(loss_of(training.model, part))
        assert training.steps.mean_loss() > 0
        return [p.grad.full_tensor() for p in training.model.parameters() if p.grad is not None]

    wanted = run_on_mesh((1,), body)[0]
    for found in run_on_mesh((4,), body):
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_gradients_are_added_to_those_that_there_are() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> list[Tensor]:
        found: list[Tensor] = []
        for kind in ("sharded", "plain"):
            training = Training(spread(start, mesh, kind), mesh)
            for batch in (DATA[:4], DATA[4:10]):
                with training.steps.step(batch) as parts:
                    for part in parts:
                        training.steps.backward(loss_of(training.model, part))
            grads = [p.grad for p in training.model.parameters() if p.grad is not None]
            found += [g.full_tensor() if kind == "sharded" else g for g in grads]
        half = len(found) // 2
        assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))
        return found

    wanted = run_on_mesh((1,), body)[0]
    for found in run_on_mesh((3,), body):
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_parts_have_aligned_memory_and_random_numbers_of_their_own() -> None:
    """What a group gets is a function of seed, step and group, wherever it runs."""
    model = nn.Linear(5, 5)
    before = torch.get_rng_state()

    def drawn(mesh: DeviceMesh, seed: int = 7) -> dict[tuple[int, int], Tensor]:
        steps = ElasticSteps(model, adam(model), seed=seed, mesh=mesh)
        found: dict[tuple[int, int], Tensor] = {}
        for step in range(2):
            with steps.step(torch.rand(4, 5, generator=generator()), torch.arange(4)) as parts:
                for values, number in parts:
                    assert values.data_ptr() % 64 == 0
                    found[step, int(number)] = torch.rand(3)
        return found

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    one, again = drawn(alone_mesh()), drawn(alone_mesh())
    assert len({tuple(values.tolist()) for values in one.values()}) == 8
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not torch.equal(one[0, 0], drawn(alone_mesh(), seed=8)[0, 0])
    assert torch.equal(torch.get_rng_state(), before)


def test_scaled_losses() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> Run:
        training = Training(spread(start, mesh, "sharded"), mesh)
        model, steps, optimizer = training.model, training.steps, training.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1)
        run = Run()
        for number in range(3):
            with steps.step(DATA[4 * number : 4 * number + 4]) as parts:
                for part in parts:
                    loss = loss_of(model, part)
                    scaler.scale(loss * (math.inf if number == 1 else 1)).backward()
                    steps.note(loss)
                scaler.unscale_(optimizer)
                run.norms.append(steps.clip_grad_norm_(0.5))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            run.losses.append(steps.mean_loss())
        assert scaler.get_scale() == 2.0**21
        run.tensors = whole_state(model, optimizer)
        return run

    wanted = run_on_mesh((1,), body)[0]
    assert [math.isfinite(one) for one in wanted.norms] == [True, False, True]
    wanted.norms[1] = 0.0
    for found in run_on_mesh((3,), body):
        found.norms[1] = 0.0
        assert found.equals(wanted)


class Chosen(nn.Module):
    """Adds a bias to elements of one kind only, and calls one layer twice."""

    def __init__(self, remade: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.bias = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.ones(5))
        self.remade = remade

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.layer(x))
        if self.remade:
            y = checkpoint(self.layer, y, use_reentrant=False)
        return y + self.bias if x.sum() > 0 else y


@pytest.mark.parametrize("remade", [False, True])
def test_parameters_that_only_some_elements_use(remade: bool) -> None:
    torch.manual_seed(1)
    start = Chosen(remade)
    values = torch.randn(7, 5)
    values[:, 0] += torch.arange(7) - 3

    def body(mesh: DeviceMesh) -> list[Tensor]:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        steps = ElasticSteps(model, adam(model), seed=0)
        with steps.step(values) as parts:
            for part in parts:
                steps.backward(model(part).square().mean())
        assert model.unused.grad is None
        return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]

    wanted = run_on_mesh((1,), body)[0]
    assert len(wanted) == 3
    for found in run_on_mesh((3,), body):
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_what_is_sent_is_that_of_a_reduce_scatter() -> None:
    start = made()

    def sent(mesh: DeviceMesh, elastic: bool) -> tuple[int, int]:
        model = spread(start, mesh, "sharded")
        part = DATA[:1]
        training = Training(model, mesh)
        if not elastic:
            loss = loss_of(model, part)
            with CommDebugMode() as comm:
                loss.backward()
            return comm.get_total_counts(), sum(comm.get_comm_bytes().values())
        comm = CommDebugMode()
        with training.steps.step(DATA[:4]) as parts:
            for one in parts:
                loss = loss_of(model, one)
                with comm:
                    loss.backward()
        return comm.get_total_counts(), sum(comm.get_comm_bytes().values())

    def body(mesh: DeviceMesh) -> None:
        counts, num_bytes = sent(mesh, elastic=False)
        elastic_counts, elastic_bytes = sent(mesh, elastic=True)
        assert elastic_counts == counts
        assert elastic_bytes <= 1.02 * num_bytes

    run_on_mesh((4,), body)


class Twice(nn.Module):
    """Runs a sharded module twice in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_gradients_of_a_module_that_runs_twice_have_to_wait() -> None:
    torch.manual_seed(1)
    start, values = Twice(), torch.randn(5, 5)

    def body(mesh: DeviceMesh) -> list[Tensor]:
        model: Any = copy.deepcopy(start)
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps = ElasticSteps(model, adam(model), seed=0)

        def step() -> None:
            with steps.step(values) as parts:
                for part in parts:
                    steps.backward(model(part).square().mean())

        with pytest.raises(PlacementError, match="set_requires_gradient_sync"):
            step()
        assert steps.count == 0
        model.layer.set_requires_gradient_sync(False)
        step()
        return [p.grad.full_tensor() for p in model.parameters()]

    wanted = run_on_mesh((1,), body)[0]
    for found in run_on_mesh((2,), body):
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
