"""Attention of DTensors with a shared sequence, against torch's on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    HeadTail,
    Partial,
    Placement,
    PlacementError,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.dtensor.attention import kernels
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.experimental.attention import context_parallel_attention, set_rotate_method
from tests.dtensor.rank_meshes import assert_holds, run_on_mesh, scattered
from tests.ranks import RanksFailed

METHODS = ("ring", "alltoall", "allgather")


def tensors(
    lengths: tuple[int, int],
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (4, 4),
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        draw(batch, heads[0], lengths[0], dims[0]),
        draw(batch, heads[1], lengths[1], dims[0]),
        draw(batch, heads[1], lengths[1], dims[1]),
        draw(batch, heads[0], lengths[0], dims[1]),
    ]


def expected(values: list[Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return torch's result and the gradients of query, key and value."""
    *inputs, grad = values
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    query, key, value = leaves
    out = F.scaled_dot_product_attention(query, key, value, **options)
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def check(
    mesh: DeviceMesh,
    values: list[Tensor],
    wanted: tuple[Tensor, list[Tensor]],
    placements: list[Any],
    **options: Any,
) -> None:
    *inputs, grad = values
    leaves = [scattered(tensor, mesh, placements).requires_grad_() for tensor in inputs]
    out = context_parallel_attention(*leaves, **options)
    assert out.placements == leaves[0].placements
    assert_holds(out.detach(), wanted[0])
    out.backward(scattered(grad, mesh, placements))
    for leaf, gradient in zip(leaves, wanted[1], strict=True):
        assert leaf.grad.placements == leaf.placements
        assert_holds(leaf.grad, gradient)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_as_on_one_device(count: int, method: Any) -> None:
    """Causal or not, of lengths that divide and not, that differ, and less than there are ranks."""
    cases = []
    for lengths, is_causal in itertools.product(
        [(24, 24), (13, 13), (7, 12), (12, 5), (3, 3)], [True, False]
    ):
        values = tensors(lengths)
        cases.append((values, is_causal, expected(values, is_causal=is_causal)))

    def body(mesh: DeviceMesh) -> None:
        for (values, is_causal, wanted), placement in itertools.product(
            cases, [HeadTail(2), Shard(2)]
        ):
            check(mesh, values, wanted, [placement], is_causal=is_causal, rotate_method=method)

    run_on_mesh((count,), body)


def test_grouped_heads_scale_other_value_dims_and_ragged_parts() -> None:
    grouped = tensors((11, 11), heads=(6, 2), dims=(4, 6))
    options: dict[str, Any] = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    wanted = expected(grouped, **options)

    def body(mesh: DeviceMesh) -> None:
        for placement in (HeadTail(2), Ragged(2, (2, 0, 9)), Replicate(), Shard(0)):
            check(mesh, grouped, wanted, [placement], **options)

    run_on_mesh((3,), body)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, {"rtol": 1e-5, "atol": 1e-5}),
        (torch.bfloat16, {"rtol": 2e-2, "atol": 4e-2}),
        (torch.float16, {"rtol": 2e-3, "atol": 4e-3}),
    ],
)
def test_narrow_numbers_are_joined_in_fp32(dtype: torch.dtype, tolerance: dict[str, Any]) -> None:
    values = tensors((37, 37), dtype=dtype)
    wanted = expected(values, is_causal=True)

    def body(mesh: DeviceMesh) -> None:
        *leaves, grad = (distribute_tensor(tensor, mesh, [HeadTail(2)]) for tensor in values)
        for leaf in leaves:
            leaf.requires_grad_()
        out = context_parallel_attention(*leaves, is_causal=True)
        out.backward(grad)
        found: list[Any] = [out.detach(), *(leaf.grad for leaf in leaves)]
        for tensor, whole in zip(found, [wanted[0], *wanted[1]], strict=True):
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor.full_tensor(), whole, **tolerance)

    run_on_mesh((3,), body)


def test_batch_and_heads_stay_where_they_are() -> None:
    values = tensors((10, 10), heads=(4, 2), batch=3)
    wanted = expected(values, is_causal=True, enable_gqa=True)

    def body(mesh: DeviceMesh) -> None:
        for other in (Shard(0), Shard(1), Replicate()):
            for placements in ([other, HeadTail(2)], [HeadTail(2), other]):
                with CommDebugMode() as counted:
                    check(mesh, values, wanted, placements, is_causal=True, enable_gqa=True)
                assert counted.get_total_counts() > 0

    run_on_mesh((2, 2), body)


def test_tiles_are_bounded_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no fused kernel: the value dim differs, or lengths do."""
    monkeypatch.setattr(kernels, "TILE_SCORES", 20)
    values = tensors((9, 14), dims=(4, 3))
    wanted = expected(values, is_causal=True)

    def body(mesh: DeviceMesh) -> None:
        check(mesh, values, wanted, [HeadTail(2)], is_causal=True)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("method", METHODS)
def test_as_few_bytes_as_there_are_keys_and_values_elsewhere(method: Any) -> None:
    """Forward every rank gets the keys and values of the others, backward again, and gradients."""
    values = tensors((16, 16))
    pair = 2 * values[1][:, :, :4].numel() * 8

    def body(mesh: DeviceMesh) -> None:
        query, key, value, grad = (scattered(t, mesh, [HeadTail(2)]) for t in values)
        for leaf in (query, key, value):
            leaf.requires_grad_()
        with CommDebugMode() as counted:
            out = context_parallel_attention(
                query, key, value, is_causal=True, rotate_method=method
            )
        assert sum(counted.get_comm_bytes().values()) == 3 * pair
        with CommDebugMode() as counted:
            out.backward(grad)
        assert sum(counted.get_comm_bytes().values()) == 6 * pair

    run_on_mesh((4,), body)


def test_keys_that_nobody_else_sees_do_not_move() -> None:
    values = tensors((16, 16))
    pair = 2 * values[1][:, :, :4].numel() * 8

    def body(mesh: DeviceMesh) -> int:
        query, key, value, _ = (scattered(t, mesh, [Shard(2)]) for t in values)
        with CommDebugMode() as counted:
            context_parallel_attention(query, key, value, is_causal=True)
        return sum(counted.get_comm_bytes().values())

    assert sum(run_on_mesh((4,), body)) == 6 * pair  # of 12 that all would be


@pytest.mark.parametrize("method", ["ring", "alltoall"])
def test_no_rank_computes_with_more_than_the_keys_of_one_at_a_time(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    attend: Any = kernels.attend

    def looking(inputs: kernels.Inputs) -> Any:
        seen.append(inputs.key.untyped_storage().nbytes())
        return attend(inputs)

    monkeypatch.setattr("dtckpt.dtensor.attention.ring_attention.attend", looking)
    values = tensors((64, 64))

    def body(mesh: DeviceMesh) -> None:
        query, key, value, _ = (scattered(t, mesh, [HeadTail(2)]) for t in values)
        context_parallel_attention(query, key, value, is_causal=True, rotate_method=method)

    run_on_mesh((4,), body)
    assert set(seen) == {(values[1].nbytes + values[2].nbytes) // 4}


def test_what_is_kept_for_the_backward_pass_is_of_this_rank() -> None:
    values = tensors((32, 32))

    def body(mesh: DeviceMesh) -> None:
        leaves = [scattered(t, mesh, [HeadTail(2)]).requires_grad_() for t in values[:3]]
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            context_parallel_attention(*leaves, is_causal=True)
        assert max(tensor.numel() for tensor in kept) == values[0].numel() // 4

    run_on_mesh((4,), body)


def test_a_shared_sequence_needs_no_gradient() -> None:
    values = tensors((8, 8))
    wanted = expected(values)

    def body(mesh: DeviceMesh) -> None:
        query, key, value, grad = (scattered(t, mesh, [HeadTail(2)]) for t in values)
        value.requires_grad_()
        out = context_parallel_attention(query, key, value)
        out.backward(grad)
        assert_holds(value.grad, wanted[1][2])
        assert query.grad is None

    run_on_mesh((2,), body)


def test_the_default_way_round_is_that_of_the_process() -> None:
    with pytest.raises(ValueError, match="'ring', 'alltoall', 'allgather'"):
        set_rotate_method("around")  # pyright: ignore[reportArgumentType]
    values = tensors((8, 8))

    def body(mesh: DeviceMesh) -> dict[str, int]:
        query, key, value, _ = (scattered(t, mesh, [HeadTail(2)]) for t in values)
        with CommDebugMode() as counted:
            context_parallel_attention(query, key, value)
        return {kind: counted.comm_counts[kind] for kind in ("all_gather", "all_to_all")}

    assert run_on_mesh((4,), body)[0] == {"all_gather": 0, "all_to_all": 3}
    set_rotate_method("allgather")
    try:
        assert run_on_mesh((4,), body)[0] == {"all_gather": 1, "all_to_all": 0}
    finally:
        set_rotate_method("ring")


def refused(body: Any, shape: tuple[int, ...] = (2,)) -> str:
    """Return what all ranks are told, before anything is sent."""
    told: list[str] = []

    def run(mesh: DeviceMesh) -> None:
        with CommDebugMode() as counted:
            with pytest.raises(PlacementError) as raised:
                body(mesh)
            assert counted.get_total_counts() == 0
        told.append(str(raised.value))

    run_on_mesh(shape, run)
    assert len(set(told)) == 1
    return told[0]


def test_what_does_not_go_together_is_refused_alike_on_all_ranks() -> None:
    values = tensors((8, 8), heads=(4, 4))

    def with_placements(*placements: Any, change: Any = None, **options: Any) -> Any:
        def body(mesh: DeviceMesh) -> None:
            given = change(values) if change else values
            leaves = [scattered(t, mesh, p) for t, p in zip(given[:3], placements, strict=True)]
            context_parallel_attention(*leaves, **options)

        return body

    alike = [[HeadTail(2)]] * 3
    assert "must lie alike" in refused(with_placements([HeadTail(2)], [Shard(2)], [Shard(2)]))
    assert "neither Partial" in refused(with_placements(*[[Shard(3)]] * 3))
    assert "neither Partial" in refused(with_placements(*[[Partial()]] * 3))
    assert "axes [0, 1] shard the sequence" in refused(
        with_placements(*[[Shard(2), Shard(2)]] * 3), (2, 2)
    )

    def heads_of_keys(count: int) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda given: [given[0], given[1][:, :count], given[2][:, :count]]

    def other_key(change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda given: [given[0], change(given[1]), given[2]]

    def narrow(key: Tensor) -> Tensor:
        return key.float()

    def short(key: Tensor) -> Tensor:
        return key[:, :, :4]

    def plain(mesh: DeviceMesh) -> None:
        given: Any = values[:3]
        context_parallel_attention(*given)

    assert "enable_gqa=True" in refused(with_placements(*alike, change=heads_of_keys(2)))
    one_head = with_placements(*[[Shard(1)]] * 3, change=heads_of_keys(1), enable_gqa=True)
    assert "some rank would have" in refused(one_head)
    dealt = with_placements(*[[HeadTail(1)]] * 3, change=heads_of_keys(2), enable_gqa=True)
    assert "no neighbours" in refused(dealt)
    assert "one mesh and dtype" in refused(with_placements(*alike, change=other_key(narrow)))
    assert "do not go together" in refused(with_placements(*alike, change=other_key(short)))
    assert "expected a DTensor" in refused(plain)


def test_second_derivatives_are_refused() -> None:
    values = tensors((4, 4))

    def body(mesh: DeviceMesh) -> None:
        leaves = [scattered(t, mesh, [HeadTail(2)]).requires_grad_() for t in values[:3]]
        out = context_parallel_attention(*leaves)
        (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        grad.sum().backward()

    with pytest.raises(RanksFailed, match=r"once_differentiable|does not require grad"):
        run_on_mesh((2,), body)


class Block(torch.nn.Module):
    """A block of a GPT that leaves attention to a function."""

    def __init__(self, width: int, attention: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(
                torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5
            )

        self.qkv, self.out = weight(3 * width, width), weight(width, width)
        self.up, self.down = weight(4 * width, width), weight(width, 4 * width)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        heads = [
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in F.linear(normed, self.qkv).chunk(3, -1)
        ]
        x = x + F.linear(self.attention(*heads).transpose(1, 2).flatten(2), self.out)
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), self.up)), self.down)


def test_a_block_of_a_gpt_trains_as_on_one_device() -> None:
    x = torch.randn(1, 13, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def train(attention: Any, place: Any) -> list[float]:
        block = Block(8, attention)
        for name, parameter in [*block.named_parameters()]:
            setattr(block, name, torch.nn.Parameter(place(parameter.detach(), Replicate())))
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        losses: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (block(place(x, HeadTail(1))) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def together(*heads: Any) -> Tensor:
        return context_parallel_attention(*heads, is_causal=True)

    def copy(tensor: Tensor, _: Placement) -> Tensor:
        return tensor.clone()

    wanted = train(alone, copy)

    def body(mesh: DeviceMesh) -> None:
        def place(tensor: Tensor, placement: Placement) -> Tensor:
            return distribute_tensor(tensor, mesh, [placement])

        assert train(together, place) == pytest.approx(wanted, rel=1e-9)

    run_on_mesh((3,), body)


def test_memory_of_any_order() -> None:
    """Kernels take for granted that the numbers of a position follow each other."""
    values = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in tensors((9, 9))]
    wanted = expected(values, is_causal=True)

    def body(mesh: DeviceMesh) -> None:
        leaves: list[Any] = []
        for whole in values[:3]:
            part = distribute_tensor(whole, mesh, [HeadTail(2)]).to_local()
            mixed = part.transpose(2, 3).contiguous().transpose(2, 3)
            leaf = DTensor.from_local(mixed, mesh, [HeadTail(2)], shape=whole.shape)
            leaves.append(leaf.requires_grad_())
        out = context_parallel_attention(*leaves, is_causal=True)
        out.backward(scattered(values[3], mesh, [HeadTail(2)]))
        assert_holds(out.detach(), wanted[0])
        for leaf, gradient in zip(leaves, wanted[1], strict=True):
            assert_holds(leaf.grad, gradient)

    run_on_mesh((2,), body)


def test_planned_on_the_meta_device() -> None:
    mesh = DeviceMesh("cpu", range(4), rank=1)
    q = distribute_tensor(torch.empty(1, 4, 9, 8, device="meta"), mesh, [HeadTail(2)])
    k = distribute_tensor(torch.empty(1, 2, 9, 8, device="meta"), mesh, [HeadTail(2)])
    q.requires_grad_()
    out = context_parallel_attention(q, k, k, is_causal=True, enable_gqa=True)
    assert (out.is_meta, out.shape, out.placements) == (True, q.shape, (HeadTail(2),))
    out.sum().backward()
    assert q.grad is not None


def test_a_rank_alone_sends_nothing() -> None:
    values = tensors((5, 5))
    wanted = expected(values, is_causal=True)

    def body(mesh: DeviceMesh) -> None:
        with CommDebugMode() as counted:
            check(mesh, values, wanted, [HeadTail(2)], is_causal=True)
        assert counted.get_total_counts() == 0

    run_on_mesh((1,), body)
