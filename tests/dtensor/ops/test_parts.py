"""Parts of sharded tensors: what stays where it is, what is written through, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
    strict,
)
from dtckpt.dtensor.ops.engine.windows import bounds_of_pieces, even_bounds, sizes_between
from dtckpt.errors import PlacementError

from ...ranks import RanksFailed, run_ranks
from ..rank_meshes import assert_holds, run_on_mesh, scattered

WHOLE = torch.arange(24.0).view(8, 3)
LONG = torch.arange(192.0).view(64, 3)


def on_four(body: Callable[[DeviceMesh], None]) -> None:
    def run(mesh: DeviceMesh) -> None:
        with strict():
            body(mesh)

    run_on_mesh((4,), run)


def silent(mesh: DeviceMesh) -> DeviceMesh:
    """Let the mesh fail where anything is communicated."""

    def refuse(axes: Any) -> Any:
        raise AssertionError(f"communicates over {axes}")

    mesh.peers = refuse  # pyright: ignore[reportAttributeAccessIssue]
    return mesh


def test_slices_stay_where_they_are() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, silent(mesh), [Shard(0)])
        made: Any
        for made, whole, placement in [
            (tensor[3:7], WHOLE[3:7], Ragged(0, (0, 1, 2, 1))),
            (tensor[::2], WHOLE[::2], Shard(0)),
            (tensor[1:, 1], WHOLE[1:, 1], Ragged(0, (1, 2, 2, 2))),
            (tensor[:0], WHOLE[:0], Shard(0)),
            (tensor.split((4, 4))[1], WHOLE[4:], Ragged(0, (0, 0, 2, 2))),
            (F.pad(tensor, (0, 0, 2, 0)), F.pad(WHOLE, (0, 0, 2, 0)), Ragged(0, (4, 2, 2, 2))),
            (tensor[3], WHOLE[3], Partial()),
            ((tensor > 3)[3], WHOLE[3] > 3, Partial("max")),
        ]:
            assert made.placements == (placement,)
            here = mesh.get_coordinate()
            assert here is not None
            assert tuple(made.to_local().shape) == made.global_layout.box(here).sizes
            if not placement.is_partial():
                assert_holds(made, whole)

    on_four(body)


def test_the_gradient_of_a_slice_lies_as_the_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, mesh, [Shard(0)]).detach().requires_grad_()
        tensor[3:5].square().sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.placements == (Shard(0),)

    on_four(body)


def test_writes_through_slices_reach_the_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor, whole = scattered(WHOLE, mesh, [Shard(0)]), WHOLE.clone()
        for each in (tensor, whole):
            each[3:7, 1:].fill_(5)
            each[1:3].add_(1)
            first, second = each.split(5)
            first.mul_(2)
            second.t()[0].zero_()
            each[1].fill_(3)
        assert_holds(tensor, whole)

    on_four(body)


def test_the_inverse_of_a_slice_is_the_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, mesh, [Shard(0)])
        found = torch.ops.aten.slice_inverse(tensor[3:7], tensor, 0, 3, 7)
        assert_holds(found, WHOLE)
        found.zero_()
        assert_holds(tensor, torch.zeros(8, 3))
        with pytest.raises(PlacementError, match="shares no memory"):
            torch.ops.aten.slice_inverse(scattered(WHOLE[:4], mesh, [Shard(1)]), tensor, 0, 0, 4)

    on_four(body)


def test_setting_items_writes_in_place_and_moves_nothing() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor, whole = scattered(WHOLE, mesh, [Shard(0)]), WHOLE.clone()
        row = scattered(torch.arange(3.0), mesh, [Replicate()])
        memory = tensor.to_local().data_ptr()
        silent(mesh)
        for each, value in ((tensor, row), (whole, torch.arange(3.0))):
            each[3] = value
            each[-1, 1:] = 7
            each[None, 2:6:2] = value
        assert tensor.to_local().data_ptr() == memory
        assert_holds(tensor, whole)

    on_four(body)


def test_setting_items_of_any_layout() -> None:
    def body(mesh: DeviceMesh) -> None:
        for placements in (
            (Shard(0), Shard(0)),
            (Shard(0, 1), Shard(0, 0)),
            (Partial(), Shard(1)),
            (Ragged(0, (7, 1)), Shard(0)),
        ):
            tensor, whole = scattered(WHOLE, mesh, placements), WHOLE.clone()
            value = scattered(torch.arange(9.0).view(3, 3), mesh, [Shard(0), Replicate()])
            with strict():
                tensor[4:7] = value
                tensor[1, 2] = -1
                tensor[2:4, [0, 2]] = value[0, :2]
            whole[4:7] = torch.arange(9.0).view(3, 3)
            whole[1, 2] = -1
            whole[2:4, [0, 2]] = torch.arange(2.0)
            assert_holds(tensor, whole)
            assert tensor.placements == scattered(WHOLE, mesh, placements).placements

    run_on_mesh((2, 2), body)


def test_errors_of_setting_items_are_torchs_own() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, mesh, [Shard(0)])
        with pytest.raises(IndexError):
            tensor[8] = 1
        with pytest.raises(IndexError):
            tensor[0, 0, 0] = 1
        with pytest.raises(RuntimeError):
            tensor[:3] = scattered(torch.ones(2, 3), mesh, [Replicate()])
        leaf = tensor.detach().requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            leaf[2] = 1

    run_on_mesh((2,), body)


def test_a_weight_sharded_by_rows_is_not_gathered() -> None:
    def body(mesh: DeviceMesh) -> None:
        weight = scattered(LONG, mesh, [Shard(0)]).detach().requires_grad_()
        chosen = torch.tensor([[63, 0], [3, 3]])
        index = scattered(chosen, mesh, [Replicate()])
        found: Any
        for found in (F.embedding(index, weight), weight[index], weight.index_select(0, index[0])):
            assert found.placements == (Partial(),)
        found = F.embedding(index, weight)
        assert_holds(found, LONG[chosen])
        found.sum().backward()
        assert weight.grad is not None
        expected = torch.zeros(64).index_add(0, chosen.flatten(), torch.ones(4))
        assert_holds(weight.grad, expected[:, None].expand(64, 3))

    on_four(body)


PICKS: list[Callable[[Any, Any], Any]] = [
    lambda x, i: x[i],
    lambda x, i: x.index_select(0, i),
    lambda x, i: x.gather(0, i[:, None]),
    lambda x, i: F.embedding(i, x),
    lambda x, i: x.index_add(0, i, x[: len(i)]),
    lambda x, i: x.index_put((i,), x[0]),
    lambda x, i: x.scatter(0, i[:, None], 1.0),
]


def test_indices_out_of_range_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(LONG, mesh, [Shard(0)])
        index = scattered(torch.tensor([1, 64]), mesh, [Replicate()])
        for pick in PICKS:
            with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                pick(tensor, index)

    on_four(body)


def test_an_index_out_of_range_on_one_rank_ends_the_others_by_the_deadline_of_the_group() -> None:
    """The rank says which it is; the others are not told, and wait no longer than their group."""

    def body(rank: int, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        table = distribute_tensor(LONG, mesh, [Replicate()])
        index = DTensor.from_local(torch.tensor([rank * 10_000]), mesh, [Shard(0)], shape=(2,))
        cast(DTensor, table[index]).full_tensor()

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body, timeout=timedelta(seconds=1))
    errors = failure.value.errors
    assert isinstance(errors[1], IndexError)
    assert "10000 is out of bounds" in str(errors[1])
    assert isinstance(errors[0], RuntimeError)


def test_new_tensors_need_no_values() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, silent(mesh), [Shard(0)])
        assert tensor.new_zeros(2).placements == (Replicate(),)
        assert tensor.new_full((8, 3), 2).placements == (Shard(0),)

    on_four(body)


def test_masks_and_places() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(WHOLE, mesh, [Shard(0)])
        assert_holds(tensor[tensor > 20], WHOLE[WHOLE > 20])
        assert_holds(tensor[tensor[:, 0] > 10, 1:], WHOLE[WHOLE[:, 0] > 10, 1:])
        assert_holds(tensor.nonzero(), WHOLE.nonzero())
        assert_holds(tensor.masked_select(tensor < 3), WHOLE[WHOLE < 3])
        changed, whole = tensor.clone(), WHOLE.clone()
        changed[tensor[:, 0] > 10, 0] = changed[tensor[:, 0] > 10, 1] * 2
        whole[WHOLE[:, 0] > 10, 0] = whole[WHOLE[:, 0] > 10, 1] * 2
        assert_holds(changed, whole)
        with pytest.raises(IndexError, match="mask"):
            tensor[tensor[:4, 0] > 1]

    on_four(body)


@pytest.mark.parametrize("extent", [1, 5, 8, 13])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_windows_are_cut_where_the_factor_is(extent: int, count: int) -> None:
    for window in [range(extent), range(2, extent), range(1, extent, 3), range(0)]:
        bounds = even_bounds(extent, count)
        sizes = sizes_between(bounds, window)
        assert sizes == tuple(
            sum(bounds[i] <= step < bounds[i + 1] for step in window) for i in range(count)
        )
        again = bounds_of_pieces(sizes, window, extent)
        assert again == sorted(again)
        assert again == bounds  # the nearest bounds to even ones that give these sizes
