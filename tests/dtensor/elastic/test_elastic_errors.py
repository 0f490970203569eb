"""What would depend on the mesh is refused, on all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    redistribute_many,
)
from dtckpt.dtensor import rand as distributed_rand
from dtckpt.dtensor.elastic import ElasticSteps
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.parallel import ColwiseParallel, parallelize_module
from tests.dtensor.rank_meshes import run_on_mesh, scattered

from .training import DATA, WORDS, Training, adam, deterministic, loss_of, made, spread


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    with deterministic():
        yield


def alone() -> DeviceMesh:
    return DeviceMesh("cpu", Mesh((1,)), rank=0)


def stepped(model: Any, steps: ElasticSteps, *batch: Tensor) -> None:
    with steps.step(*batch) as parts:
        for part in parts:
            steps.backward(model(part).square().mean())


def test_reductions_that_depend_on_the_mesh_are_errors_within_a_step() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        training = Training(spread(start, mesh, "sharded"), mesh)
        model, steps = training.model, training.steps
        terms = scattered(torch.ones(3), mesh, [Partial()])
        with steps.step(DATA[:2]) as parts:
            for part in parts:
                steps.backward(loss_of(model, part))
                with pytest.raises(PlacementError, match="depends on the mesh"):
                    terms.full_tensor()
            with pytest.raises(PlacementError, match="clip_grad_norm_ of ElasticSteps"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(PlacementError, match="float32 terms"):
                terms.redistribute(placements=[Shard(0)])
            for placement in (Shard(0), Replicate()):
                with pytest.raises(PlacementError, match="float32 terms"):
                    redistribute_many([terms, 2 * terms], placements=[placement])
            assert nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None], math.inf
            )
            scattered(torch.ones(3, dtype=torch.int64), mesh, [Partial()]).full_tensor()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run_on_mesh((2,), body)


def test_models_of_which_parts_depend_on_who_runs_what() -> None:
    mesh = alone()
    norms: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    steps = ElasticSteps(norms, adam(norms), seed=0, mesh=mesh, group=2)
    with pytest.raises(PlacementError, match="'1' is a BatchNorm1d that trains"):
        stepped(norms, steps, torch.ones(4, 4))
    norms.eval()
    stepped(norms, steps, torch.ones(4, 4))

    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(input)

    class Replaced(Counted):
        def forward(self, input: Tensor) -> Tensor:
            for _ in range(2):  # the second is made where the memory of the first one was
                self.seen = self.seen + 1
            return nn.Linear.forward(self, input)

    for kind in (Counted, Replaced):
        counted = kind()
        steps = ElasticSteps(counted, adam(counted), seed=0, mesh=mesh)
        with pytest.raises(PlacementError, match="the buffers seen were written"):
            stepped(counted, steps, torch.ones(2, 4))

    shifted = nn.Linear(4, 4, bias=False)
    shifted.weight = nn.Parameter(torch.ones(17)[1:].view(4, 4))
    steps = ElasticSteps(shifted, adam(shifted), seed=0, mesh=mesh)
    with pytest.raises(PlacementError, match="'weight' begins at an address"):
        stepped(shifted, steps, torch.ones(2, 4))


def test_parameters_that_are_split_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        steps = ElasticSteps(model, adam(model), seed=0, mesh=mesh["tp"])
        with pytest.raises(PlacementError, match=r"'0\.weight' lies as .* split over ranks"):
            stepped(model, steps, torch.ones(2, 4))
        fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(PlacementError, match=r"'0\.weight' is split over"):
            ElasticSteps(model, adam(model), seed=0)

    run_on_mesh((1, 2), body, ("dp", "tp"))


def test_what_else_is_done_to_gradients() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        training = Training(spread(start, mesh, "sharded"), mesh)
        training.model.set_requires_gradient_sync(False)
        loss_of(training.model, DATA[:1]).backward()
        training.model.set_requires_gradient_sync(True)
        with pytest.raises(PlacementError, match="wait from earlier backward passes"):
            training.train(1)
        training.model.zero_grad()
        training.train(1)
        training.model.set_all_reduce_hook(torch.Tensor.neg_)
        with pytest.raises(PlacementError, match="has a hook of set_all_reduce_hook"):
            training.train(1)

    run_on_mesh((2,), body)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (partial(torch.optim.SGD, momentum=0.9, fused=True), "SGD on torch.float32 gives"),
        (torch.optim.Adafactor, "other bits where they lie in other shards"),
        (torch.optim.LBFGS, "could not be tried"),
    ],
)
def test_optimizers_that_round_by_where_elements_lie(make: Any, match: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = make(model.parameters())
    with pytest.raises(PlacementError, match=match):
        ElasticSteps(model, optimizer, seed=0, mesh=alone())
    assert not optimizer.state or make is torch.optim.LBFGS


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam]
)
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_that_do_not(optimizer: Any, foreach: bool) -> None:
    model = nn.Linear(3, 3)
    ElasticSteps(
        model, optimizer(model.parameters(), lr=0.1, foreach=foreach), seed=0, mesh=alone()
    )


def test_kernels_have_to_be_deterministic() -> None:
    training = Training(made(), alone())
    torch.use_deterministic_algorithms(False)
    with (
        pytest.raises(PlacementError, match="use_deterministic_algorithms"),
        training.steps.step(DATA[:2]),
    ):
        pass


def test_ranks_that_differ_are_told_so() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        here = mesh.get_local_rank()
        model = copy.deepcopy(start)
        own = ElasticSteps(model, adam(model), seed=here, mesh=mesh)
        with pytest.raises(PlacementError, match="have another seed than the first"):
            stepped(model, own, DATA[:2])
        steps = ElasticSteps(model, adam(model), seed=0, mesh=mesh)
        with pytest.raises(PlacementError, match=r"\[\(1,\)\].* have another batch"):
            stepped(model, steps, DATA[here : here + 2])
        torch.nn.init.constant_(model.head.weight, here)
        with pytest.raises(PlacementError, match="another plain parameter or buffer"):
            stepped(model, steps, DATA[:2])
        steps.count = here
        with pytest.raises(PlacementError, match="another count of steps"):
            stepped(model, steps, DATA[:2])

    run_on_mesh((2,), body)


def test_what_one_rank_cannot_do_is_told_to_all() -> None:
    def body(mesh: DeviceMesh) -> None:
        here = mesh.get_local_rank()
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(mode=here == 1)
        steps = ElasticSteps(model, adam(model), seed=0, mesh=mesh, group=2)
        told = "that trains" if here else r"at \[\(1,\)\] of .* cannot take the step"
        with pytest.raises(PlacementError, match=told):
            stepped(model, steps, torch.ones(4, 4))
        model.eval()
        told = "of 3 elements is not made of groups of 2" if here else "cannot take the step"
        with pytest.raises(PlacementError, match=told):
            stepped(model, steps, torch.ones(4 - here, 4))
        assert steps.count == 0

    run_on_mesh((2,), body)


def test_batches_that_do_not_fit() -> None:
    model = made()
    steps = ElasticSteps(model, adam(model), seed=0, group=3, mesh=alone())
    wrong: list[tuple[Any, str]] = [
        ((), "needs the tensors"),
        ((DATA[:4],), "4 elements is not made of groups of 3"),
        ((DATA[:0],), "of 0 elements"),
        ((DATA[:3], DATA[:6]), "not of one batch"),
        ((DATA[:3].tolist(),), "takes tensors, got list"),
    ]
    for batch, match in wrong:
        with pytest.raises(PlacementError, match=match), steps.step(*batch):
            pass
    with pytest.raises(PlacementError, match="1 or more elements"):
        ElasticSteps(model, adam(model), seed=0, group=0, mesh=alone())

    def body(mesh: DeviceMesh) -> None:
        training = Training(copy.deepcopy(model), mesh)
        terms = scattered(torch.ones(4, 3), mesh, [Partial()])
        with pytest.raises(PlacementError, match="terms"), training.steps.step(terms):
            pass

    run_on_mesh((2,), body)


def test_loops_that_are_left_early_leave_all_as_it_was() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        for kind in ("sharded", "replicated"):
            training = Training(spread(start, mesh, kind), mesh)
            model, steps = training.model, training.steps

            def leave(steps: ElasticSteps = steps, model: Any = model) -> None:
                with steps.step(DATA[:4]) as parts:
                    for part in parts:
                        steps.backward(loss_of(model, part))
                        break

            with pytest.raises(PlacementError, match="not brought to its end"):
                leave()
            assert steps.count == 0
            assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
            with pytest.raises(PlacementError, match="losses were noted"):
                steps.mean_loss()
            with pytest.raises(PlacementError, match="within the loop"):
                steps.note(torch.ones(()))
            training.train(1)

    run_on_mesh((2,), body)


def test_a_backward_pass_outside_of_the_loop() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        training = Training(spread(start, mesh, "sharded"), mesh)
        with training.steps.step(DATA[:4]) as parts:
            losses = [loss_of(training.model, part) for part in parts]
            with pytest.raises(PlacementError, match="outside of the loop"):
                losses[0].backward()
            with pytest.raises(PlacementError, match="looped over once"):
                iter(parts)

    run_on_mesh((2,), body)


def test_states_that_would_go_on_with_other_bits() -> None:
    model = made()
    steps = ElasticSteps(model, adam(model), seed=1, mesh=alone())
    stepped(model, steps, DATA[:2, :-1])
    state: Any = steps.state_dict()
    assert state["count"] == 1
    for change, match in (
        ({"seed": 2}, "seed 2, now 1"),
        ({"group": 4}, "group 4, now 1"),
        ({"environment": {**state["environment"], "threads": "77"}}, "threads '77', now"),
        ({"environment": {}}, "vector instructions None"),
    ):
        other = ElasticSteps(model, adam(model), seed=1, mesh=alone())
        with pytest.raises(PlacementError, match=match):
            other.load_state_dict({**state, **change})
        assert other.count == 0
    anywhere = ElasticSteps(model, adam(model), seed=1, mesh=alone(), any_environment=True)
    anywhere.load_state_dict({**state, "environment": {}})
    assert anywhere.count == 1


def test_random_numbers_of_distributed_tensors_within_a_part() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        training = Training(copy.deepcopy(start), mesh)
        alike = distributed_rand(3, device_mesh=mesh).to_local()
        with training.steps.step(DATA[:3]) as parts:
            for part in parts:
                with pytest.raises(PlacementError, match="where each rank runs elements of its"):
                    distributed_rand(3, device_mesh=mesh)
                training.steps.backward(loss_of(training.model, part))
            found = distributed_rand(3, device_mesh=mesh).to_local()
        assert not torch.equal(found, alike)

    run_on_mesh((2,), body)


def test_sparse_gradients() -> None:
    model = nn.Embedding(WORDS, 3, sparse=True)
    steps = ElasticSteps(model, torch.optim.SGD(model.parameters()), seed=0, mesh=alone())
    with pytest.raises(PlacementError, match="sparse=False"):
        stepped(model, steps, DATA[:2])


def test_ranks_outside_of_the_mesh() -> None:
    model = nn.Linear(2, 2)
    outside = DeviceMesh("cpu", Mesh((1,)), rank=1)
    with pytest.raises(PlacementError, match="this rank is not in the mesh"):
        ElasticSteps(model, adam(model), seed=0, mesh=outside)


def test_losses_are_numbers_of_this_rank() -> None:
    model = made()
    steps = ElasticSteps(model, adam(model), seed=1, mesh=alone())
    with steps.step(DATA[:2]) as parts:
        for part in parts:
            with pytest.raises(PlacementError, match="is one number"):
                steps.backward(model(part[:, :-1]))
            loss = DTensor.from_local(torch.ones(()), alone(), [Replicate()])
            with pytest.raises(PlacementError, match="is one number"):
                steps.backward(loss)
            steps.note(torch.tensor(math.inf))
    assert steps.mean_loss() == math.inf
