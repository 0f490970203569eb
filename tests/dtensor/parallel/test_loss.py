"""Cross entropy of logits that are sharded by class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Packed,
    Partial,
    Placement,
    PlacementError,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.parallel import loss_parallel, parallel_cross_entropy
from tests.dtensor.rank_meshes import assert_holds, run_on_mesh, scattered

N, C = 6, 11
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "one rank": ((1,), (Shard(1),)),
    "classes": ((3,), (Shard(1),)),
    "more ranks than classes in all": ((2,), (Ragged(1, (0, 11)),)),
    "batch": ((2,), (Shard(0),)),
    "whole": ((2,), (Replicate(),)),
    "terms": ((2,), (Partial("sum"),)),
    "batch and classes": ((2, 2), (Shard(0), Shard(1))),
    "classes twice": ((2, 2), (Shard(1, order=1), Shard(1, order=0))),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def indices() -> Tensor:
    found = torch.randint(C, (N,), generator=torch.Generator().manual_seed(5))
    found[2] = -100
    return found


SOFT = torch.softmax(numbers(N, C, seed=3), -1)
WEIGHT = numbers(C, seed=2).abs()
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weights": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, weights": {"weight": WEIGHT, "label_smoothing": 0.3},
    "another index": {"ignore_index": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("soft", [False, True])
def test_losses_and_gradients_are_those_of_one_device(layout: str, soft: bool) -> None:
    shape, placements = LAYOUTS[layout]
    x = numbers(N, C)
    target = SOFT if soft else indices().clamp(min=0)
    if not soft:
        target[2] = -100

    def body(mesh: DeviceMesh) -> None:
        for name, options in KINDS.items():
            if soft and "ignore_index" in options:
                continue
            given = target.masked_fill(target == -100, 4) if "ignore_index" in options else target
            whole = x.clone().requires_grad_()
            wanted = F.cross_entropy(whole, given, **options)
            wanted.square().sum().backward()
            logits = scattered(x, mesh, placements).requires_grad_()
            found = parallel_cross_entropy(logits, given, **options)
            if options.get("reduction") != "none":
                assert all(p.is_replicate() for p in found.placements)
            assert_holds(found, wanted.detach())
            found.square().sum().backward()
            assert isinstance(logits.grad, DTensor), name
            assert whole.grad is not None
            torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)

    run_on_mesh(shape, body)


def test_classes_may_be_any_dim_and_targets_distributed() -> None:
    x, t = numbers(3, C, 4, 2), indices()[[0, 1, 3]].view(3, 1, 1).expand(3, 4, 2).contiguous()

    def body(mesh: DeviceMesh) -> None:
        wanted = F.cross_entropy(x, t)
        logits = scattered(x, mesh, [Shard(2), Shard(1)])
        target = scattered(t, mesh, [Replicate(), Shard(2)])
        assert_holds(parallel_cross_entropy(logits, target, dim=1), wanted)
        each = parallel_cross_entropy(logits, target, dim=1, reduction="none")
        assert each.placements == (Shard(1), Replicate())
        assert_holds(each, F.cross_entropy(x, t, reduction="none"))

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_squared_normaliser_of_what_counts_is_added(reduction: Any) -> None:
    x, t = numbers(N, C), indices()

    def body(mesh: DeviceMesh) -> None:
        whole = x.clone().requires_grad_()
        squares = whole.logsumexp(-1).square() * (t != -100)
        added = {"mean": squares.sum() / (N - 1), "sum": squares.sum(), "none": squares}[reduction]
        wanted = F.cross_entropy(whole, t, WEIGHT, reduction=reduction) + 0.1 * added
        wanted.square().sum().backward()
        logits = scattered(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
        found = parallel_cross_entropy(logits, t, WEIGHT, reduction=reduction, z_loss=0.1)
        assert_holds(found, wanted.detach())
        found.square().sum().backward()
        assert isinstance(logits.grad, DTensor)
        assert whole.grad is not None
        torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)

    run_on_mesh((2, 2), body)


def test_probabilities_have_gradients_too() -> None:
    x, p = numbers(N, C), SOFT

    def body(mesh: DeviceMesh) -> None:
        whole = p.clone().requires_grad_()
        F.cross_entropy(x, whole, WEIGHT, label_smoothing=0.2).backward()
        target = scattered(p, mesh, [Shard(1)]).requires_grad_()
        logits = scattered(x, mesh, [Shard(1)])
        parallel_cross_entropy(logits, target, WEIGHT, label_smoothing=0.2).backward()
        assert isinstance(target.grad, DTensor)
        assert whole.grad is not None
        torch.testing.assert_close(target.grad.full_tensor(), whole.grad)

    run_on_mesh((2,), body)


class Largest(TorchDispatchMode):
    """The most elements that any plain tensor has that is made within it."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and not isinstance(one, DTensor):
                self.found = max(self.found, one.numel())
        return result


def test_the_logits_are_never_gathered() -> None:
    batch, classes, ranks = 16, 4001, 4
    x = torch.randn(batch, classes, generator=torch.Generator().manual_seed(0))
    t = torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(1))

    def body(mesh: DeviceMesh) -> None:
        part = batch * -(-classes // ranks)
        for kind in ("function", "context"):
            logits = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            with CommDebugMode() as comm, Largest() as largest:
                if kind == "function":
                    with loss_parallel():
                        loss = parallel_cross_entropy(logits, t)
                else:
                    with loss_parallel():
                        loss = F.cross_entropy(logits, t)
                loss.backward()
            assert largest.found <= part
            numbers_of_batch = 4 * batch * (ranks - 1)
            if kind == "function":
                assert comm.get_total_counts() == 2
                assert sum(comm.get_comm_bytes().values()) <= 3 * numbers_of_batch
            else:
                assert sum(comm.get_comm_bytes().values()) <= 8 * numbers_of_batch
            whole: Any = loss
            assert_holds(whole.redistribute(), F.cross_entropy(x, t))

    run_on_mesh((ranks,), body)


def test_half_precision_is_summed_in_single() -> None:
    x = torch.randn(N, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    t = indices()

    def body(mesh: DeviceMesh) -> None:
        loss = parallel_cross_entropy(distribute_tensor(x, mesh, [Shard(1)]), t)
        assert loss.dtype == torch.bfloat16
        assert torch.equal(loss.to_local(), F.cross_entropy(x.float(), t).bfloat16())

    run_on_mesh((2,), body)


def test_losses_within_autocast_are_as_precise_as_there() -> None:
    """A loss in fp16 would be infinite once a ``GradScaler`` has scaled it."""
    x, t = numbers(N, C).half(), indices()

    def body(mesh: DeviceMesh) -> None:
        for reduction in ("mean", "none"):
            logits = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            whole = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                found = parallel_cross_entropy(logits, t, reduction=reduction)
                wanted = F.cross_entropy(whole, t, reduction=reduction)
            assert found.dtype == wanted.dtype == torch.float32
            assert_holds(found, wanted.detach())
            (found.sum() * 2.0**16).backward()
            (wanted.sum() * 2.0**16).backward()
            assert isinstance(logits.grad, DTensor)
            assert logits.grad.dtype == torch.float16
            assert whole.grad is not None
            torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)

    run_on_mesh((2,), body)


def test_what_is_no_class_is_not_a_number() -> None:
    def body(mesh: DeviceMesh) -> None:
        logits = distribute_tensor(numbers(3, C), mesh, [Shard(1)])
        each = parallel_cross_entropy(logits, torch.tensor([0, C, -1]), reduction="none")
        assert each.full_tensor().isnan().tolist() == [False, True, True]

    run_on_mesh((2,), body)


def test_infinite_logits_are_as_on_one_device() -> None:
    x, t = numbers(N, C), indices()
    x[0, 3] = -torch.inf
    x[1] = -torch.inf
    x[1, int(t[1])] = 0.0

    def body(mesh: DeviceMesh) -> None:
        logits = distribute_tensor(x, mesh, [Shard(1)])
        for smoothing in (0.0, 0.1):
            each = parallel_cross_entropy(logits, t, reduction="none", label_smoothing=smoothing)
            wanted = F.cross_entropy(x, t, reduction="none", label_smoothing=smoothing)
            torch.testing.assert_close(each.full_tensor(), wanted, equal_nan=True)

    run_on_mesh((2,), body)


def test_what_does_not_go_together_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        logits = distribute_tensor(numbers(N, C), mesh, [Shard(1)])
        whole: Any = numbers(N, C)
        with pytest.raises(PlacementError, match=r"got Tensor of torch; F.cross_entropy"):
            parallel_cross_entropy(whole, indices())
        with pytest.raises(PlacementError, match=r"int64 of shape \[6\], or probabilities"):
            parallel_cross_entropy(logits, indices()[:3])
        with pytest.raises(PlacementError, match="got int32"):
            parallel_cross_entropy(logits, indices().int())
        with pytest.raises(PlacementError, match="one number for each of 11 classes"):
            parallel_cross_entropy(logits, indices(), WEIGHT[:3])
        with pytest.raises(PlacementError, match="target is a plain tensor that differs"):
            parallel_cross_entropy(logits, indices().fill_(mesh.get_local_rank()))
        with pytest.raises(ValueError, match="label_smoothing must be between 0 and 1"):
            parallel_cross_entropy(logits, indices(), label_smoothing=2.0)
        with pytest.raises(ValueError, match="reduction must be"):
            parallel_cross_entropy(logits, indices(), reduction="average")  # pyright: ignore[reportArgumentType]

    run_on_mesh((2,), body)


def test_the_context_alike() -> None:
    def body(mesh: DeviceMesh) -> None:
        logits = distribute_tensor(numbers(3, C), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            lost: Any = F.cross_entropy(logits, torch.tensor([0, C, 1]))
            assert lost.full_tensor().isnan()
            ignored = F.cross_entropy(logits, torch.full((3,), -100))
        ignored.backward()
        assert isinstance(logits.grad, DTensor)
        assert not logits.grad.full_tensor().any()  # as on one device, though the loss is 0 / 0

    run_on_mesh((2,), body)


def test_a_target_that_is_no_class_is_not_a_number_on_every_rank() -> None:
    logits, target = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), [1, 2, 3, 99]

    def body(mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Shard(1)):
            ours = distribute_tensor(logits, mesh, [placement])
            found = parallel_cross_entropy(ours, torch.tensor(target))
            assert found.full_tensor().isnan()

    run_on_mesh((2,), body)


def test_batches_and_classes_of_several_ranges() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 10, dtype=torch.float64, generator=generator)
    target, alone = torch.arange(7) % 10, logits.clone().requires_grad_()
    expected = F.cross_entropy(alone, target)
    expected.backward()

    def body(mesh: DeviceMesh) -> None:
        for placement in (Packed(0, (4, 3)), Packed(1, (6, 4))):
            ours: Any = distribute_tensor(logits, mesh, [placement]).requires_grad_()
            found = parallel_cross_entropy(ours, target)
            torch.testing.assert_close(found.full_tensor(), expected)
            found.backward()
            assert ours.grad.placements == (placement,)
            torch.testing.assert_close(ours.grad.full_tensor(), alone.grad)

    run_on_mesh((2,), body)
