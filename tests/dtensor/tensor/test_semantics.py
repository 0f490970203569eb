"""What distributed tensors are often wrong about, one by one."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# One line per function under test.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Partial, Ragged, Replicate, Shard, distribute_tensor
from dtckpt.errors import PlacementError

from ...ranks import RanksFailed
from ..rank_meshes import assert_holds, run_on_mesh, scattered


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
def test_partial_values_are_reduced_before_they_are_read(reduce_op: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        value = scattered(torch.tensor(8.0), mesh, [Partial(reduce_op)])
        assert value.item() == float(value) == int(value) == 8
        assert bool(value)
        assert f"{value.full_tensor():.1f}" == "8.0"
        vector = scattered(torch.tensor([8.0, 4.0]), mesh, [Partial(reduce_op)])
        assert torch.equal(vector, scattered(torch.tensor([8.0, 4.0]), mesh, [Replicate()]))
        with pytest.raises(PlacementError, match=r"full_tensor\(\) first"):
            vector.tolist()

    run_on_mesh((3,), body)


def test_texts_never_communicate() -> None:
    def body(mesh: DeviceMesh) -> None:
        if mesh.get_rank():
            return  # so that a collective would wait for ever
        for placements in ([Partial()], [Partial("max")]):
            for local in (torch.tensor(4.0), torch.tensor([8.0, 4.0])):
                x = DTensor.from_local(local, mesh, placements)
                for text in (str(x), repr(x), f"{x}", f"{x!s}", f"{x!r}", f"{x}"):
                    assert f"local_terms={local!r}, not reduced: see full_tensor()" in text
                assert len(format(x, "")) == len(str(x))
        number = DTensor.from_local(torch.tensor(4.0), mesh, [Partial()])
        with pytest.raises(PlacementError, match=r"is not reduced, .* '.1f'; format its full_ten"):
            format(number, ".1f")
        whole = DTensor.from_local(torch.tensor(4.0), mesh, [Replicate()])
        assert f"{whole:.1f}" == "4.0"
        assert "local=tensor(4.)" in str(whole)

    run_on_mesh((2,), body)


def test_what_is_read_of_a_zero_that_is_a_sum() -> None:
    def body(mesh: DeviceMesh) -> None:
        terms = torch.tensor(1.0 if mesh.get_rank() == 0 else -1.0)
        assert not bool(DTensor.from_local(terms, mesh, [Partial()]))

    run_on_mesh((2,), body)


CONSTANTS: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("add", lambda x: x + 1),
    ("radd", lambda x: 3 - x),
    ("add_", lambda x: x.clone().add_(1)),
    ("fill_", lambda x: x.clone().fill_(7)),
    ("fill", lambda x: torch.full_like(x, 7)),
    ("ones_like", torch.ones_like),
    ("empty_like_fill", lambda x: torch.empty_like(x).fill_(7)),
    ("masked_fill", lambda x: x.masked_fill(x > 3, 9.0)),
    ("where", lambda x: torch.where(x > 3, x, 9.0)),
    ("pad", lambda x: F.pad(x, (1, 1), value=2.0)),
    ("clamp", lambda x: x.clamp(min=4)),
    ("item_assignment", lambda x: torch.cat([x, x.new_ones(2)])),
    ("mean_minus", lambda x: x - x.mean()),
    ("relu", torch.relu),
    ("pow", lambda x: x**2),
    ("product", lambda x: x * x),
]


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
def test_constants_do_not_count_once_per_term(reduce_op: str) -> None:
    whole = torch.tensor([2.0, 5.0, -1.0, 3.5])

    def body(mesh: DeviceMesh) -> None:
        for name, function in CONSTANTS:
            value = scattered(whole, mesh, [Partial(reduce_op)])
            torch.testing.assert_close(function(value).full_tensor(), function(whole), msg=name)

    run_on_mesh((3,), body)


EMPTY: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("max", lambda x: x.max()),
    ("min", lambda x: x.min()),
    ("amax", lambda x: x.amax(0)),
    ("amin", lambda x: x.amin((0, 1))),
    ("aminmax", lambda x: torch.aminmax(x).max),
    ("max_dim", lambda x: x.max(0).values),
    ("max_index", lambda x: x.max(0).indices),
    ("argmax", lambda x: x.argmax()),
    ("argmin_dim", lambda x: x.argmin(0)),
    ("norm", lambda x: x.norm()),
    ("norm_inf", lambda x: x.norm(float("inf"))),
    ("norm_dim", lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=0)),
    ("mean", lambda x: x.mean(0)),
    ("var", lambda x: x.var(0)),
    ("std", lambda x: x.std()),
    ("logsumexp", lambda x: x.logsumexp(0)),
    ("median", lambda x: x.median(0).values),
    ("prod", lambda x: x.prod(0)),
    ("softmax", lambda x: x.softmax(0)),
    ("any", lambda x: (x > 2).any(0)),
    ("all", lambda x: (x > -9).all()),
]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_reductions_where_some_ranks_hold_nothing(rows: int) -> None:
    whole = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))

    def body(mesh: DeviceMesh) -> None:
        for name, function in EMPTY:
            if rows == 1 and name in ("var", "std"):
                continue
            for placement in (Shard(0), Ragged(0, (0, rows, 0, 0))):
                found = function(scattered(whole, mesh, [placement]))
                text = f"{name} of {rows} rows"
                torch.testing.assert_close(
                    found.full_tensor(), function(whole), msg=lambda m, t=text: f"{t}: {m}"
                )

    run_on_mesh((4,), body)


def test_reductions_of_nothing_at_all_fail_alike() -> None:
    def body(mesh: DeviceMesh) -> None:
        scattered(torch.zeros(0, 3), mesh, [Shard(0)]).max()

    with pytest.raises(RanksFailed) as failure:
        run_on_mesh((2,), body)
    assert set(failure.value.errors) == {0, 1}
    assert len({str(error) for error in failure.value.errors.values()}) == 1


def test_means_count_elements_and_not_shards() -> None:
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])

    def body(mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Ragged(0, (4, 0, 1))):
            value = scattered(whole, mesh, [placement])
            assert value.mean().item() == whole.mean().item()
            torch.testing.assert_close(value.var().item(), whole.var().item())
        logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
        target = torch.tensor([1, -100, 3, -100, 6])
        weight = torch.linspace(0.1, 2, 7)
        variants: list[dict[str, Any]] = [{}, {"weight": weight}, {"label_smoothing": 0.1}]
        for placement in (Shard(0), Replicate()):
            for options in variants:
                given: dict[str, Any] = {
                    k: scattered(v, mesh, [Replicate()]) if isinstance(v, Tensor) else v
                    for k, v in options.items()
                }
                loss = F.cross_entropy(
                    scattered(logits, mesh, [placement]),
                    scattered(target, mesh, [placement]),
                    **given,
                )
                expected = F.cross_entropy(logits, target, **options)
                torch.testing.assert_close(loss.item(), expected.item())

    run_on_mesh((3,), body)


def test_convolutions_whose_other_dims_are_cut() -> None:
    image, kernel = torch.randn(2, 4, 9, 7), torch.randn(6, 4, 3, 3)
    wide, flipped = torch.randn(2, 4, 11), torch.randn(4, 3, 3)

    def body(mesh: DeviceMesh) -> None:
        for dim in range(4):
            for kernel_dim in range(4):
                left = scattered(image, mesh, [Shard(dim)]).requires_grad_()
                right = scattered(kernel, mesh, [Shard(kernel_dim)]).requires_grad_()
                found: Any = F.conv2d(left, right, padding=1, stride=2)
                a, b = image.clone().requires_grad_(), kernel.clone().requires_grad_()
                expected = F.conv2d(a, b, padding=1, stride=2)
                torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-4)
                found.square().sum().backward()
                expected.square().sum().backward()
                for ours, theirs in ((left.grad, a.grad), (right.grad, b.grad)):
                    assert isinstance(ours, DTensor)
                    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-3, atol=1e-3)
        for dim in range(3):
            found: Any = F.conv_transpose1d(
                scattered(wide, mesh, [Shard(dim)]), scattered(flipped, mesh, [Replicate()])
            )
            expected = F.conv_transpose1d(wide, flipped)
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-4)

    run_on_mesh((2,), body)


def test_replicas_have_memory_of_their_own() -> None:
    def body(mesh: DeviceMesh) -> None:
        for source in (0, None):
            given = torch.zeros(4)
            made: Any = distribute_tensor(given, mesh, [Replicate()], src_data_rank=source)
            made.add_(1)
            assert given.sum() == 0
            whole = made.full_tensor()
            copied = made.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()])
            copied.add_(1)
            assert_holds(made, torch.ones(4))
            assert torch.equal(whole, torch.ones(4))

    run_on_mesh((2,), body)


def test_wrong_descriptions_are_errors_everywhere() -> None:
    def body(mesh: DeviceMesh) -> None:
        local = torch.ones(2, 3)
        wrong: list[Callable[[], object]] = [
            lambda: DTensor.from_local(local, mesh, [Shard(0), Replicate()]),
            lambda: DTensor.from_local(local, mesh, [Shard(2)]),
            lambda: DTensor.from_local(local, mesh, [Shard(0)], shape=(7, 3)),
            lambda: DTensor.from_local(torch.ones(1 + 2 * mesh.get_rank(), 3), mesh, [Shard(0)]),
            lambda: DTensor.from_local(local, mesh, [Ragged(0, (1, 3))], shape=(4, 3)),
            lambda: distribute_tensor(local, mesh, [Shard(0), Shard(1)]),
            lambda: distribute_tensor(local, mesh, [Shard(-3)]),
            lambda: distribute_tensor(local, mesh, cast(Any, Shard(0))),
            lambda: scattered(local, mesh, [Shard(0)]).redistribute(placements=[]),
        ]
        for call in wrong:
            with pytest.raises(PlacementError):
                call()

    run_on_mesh((2,), body)


def test_operators_say_what_is_wrong_before_anything_is_sent() -> None:
    def body(mesh: DeviceMesh) -> None:
        a = scattered(torch.ones(4, 3), mesh, [Shard(0)])
        other = DeviceMesh("cpu", [1, 0], rank=mesh.get_rank(), groups=None)
        with pytest.raises(PlacementError, match=r"aten.add.*tensor 1.*one mesh"):
            _ = a + DTensor.from_local(torch.ones(2, 3), other, [Shard(0)], shape=(4, 3))
        with pytest.raises(PlacementError, match=r"aten.mul.*float32\[4, 3\] \(S\(0\)\).*plain"):
            _ = a * torch.full((4, 3), float(mesh.get_rank()))
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            _ = a @ scattered(torch.ones(4, 3), mesh, [Shard(1)])

    run_on_mesh((2,), body)


def test_torch_finds_local_and_spec_under_its_names() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(8.0).view(4, 2)
        x = scattered(whole, mesh, [Shard(1)])
        assert x._local_tensor is x.local
        assert x._spec is x.spec
        x._local_tensor = x.local.clone()
        assert x._local_tensor is x.local
        view: Any = x.view(-1)  # a copy, which is not to be read once the tensor is written
        assert view._local_tensor is view.local
        x.mul_(2)
        for name in ("local", "_local_tensor"):
            with pytest.raises(PlacementError, match="view it again"):
                getattr(view, name)
        awaited: Any = x.redistribute(placements=[Replicate()], async_op=True)
        assert torch.equal(awaited._local_tensor, whole * 2)
        assert awaited._local_tensor is awaited.local

    run_on_mesh((2,), body)
