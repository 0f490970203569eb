"""``from_local`` of parts whose sizes only the ranks know."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Layout,
    Mesh,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)
from dtckpt.dtensor.geometry.placement import Placement, parse_placement
from dtckpt.dtensor.mesh.rows import gather_rows
from dtckpt.dtensor.tensor import local_parts
from dtckpt.errors import PlacementError

from ...ranks import RanksFailed
from ..rank_meshes import assert_holds, run_on_mesh, scattered
from .test_redistribute import SHAPES, random_placements


def without_sizes(placements: Sequence[Placement]) -> list[Placement]:
    """The same placements with the sizes of every Ragged left out."""
    return [Ragged(p.dim) if isinstance(p, Ragged) else p for p in placements]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 1, 2)])
def test_sizes_that_are_left_out_are_those_of_the_ranks(mesh_shape: tuple[int, ...]) -> None:
    def body(mesh: DeviceMesh) -> int:
        rng = random.Random(3)
        found = 0
        for shape in SHAPES * 25:
            whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            placements = random_placements(rng, mesh.shape, shape)
            given = without_sizes(placements)
            if given == list(placements):
                continue
            tensor = scattered(whole, mesh, placements)
            options: dict[str, Any] = rng.choice([{}, {"shape": shape}])
            run_check = not tensor.global_layout.is_partial and rng.random() < 0.3
            local = tensor.to_local()
            made = DTensor.from_local(local, mesh, given, run_check=run_check, **options)
            assert made.global_layout == tensor.global_layout, (shape, placements)
            assert_holds(made, whole)
            assert local.numel() == 0 or made.to_local().data_ptr() == local.data_ptr()
            found += 1
        return found

    assert min(run_on_mesh(mesh_shape, body)) > 15


def test_sizes_are_asked_for_in_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(row: list[int], mesh: DeviceMesh) -> Any:
        rows.append(mesh.get_rank())
        return gather_rows(row, mesh)

    monkeypatch.setattr(local_parts, "gather_rows", counted)

    def body(mesh: DeviceMesh) -> None:
        local = torch.ones(mesh.get_local_rank(0), 2 - mesh.get_local_rank(1))
        made = DTensor.from_local(local, mesh, [Ragged(-2), Ragged(1)])
        assert made.placements == (Ragged(0, (0, 1)), Ragged(1, (2, 1)))
        DTensor.from_local(local, mesh, made.placements, shape=(1, 3))

    run_on_mesh((2, 2), body)
    assert sorted(rows) == [0, 1, 2, 3]


def test_gradients_go_through() -> None:
    def body(mesh: DeviceMesh) -> None:
        local = torch.full((3 * mesh.get_rank(), 2), 2.0, requires_grad=True)
        made = DTensor.from_local(local, mesh, [Ragged(0)])
        assert made.placements == (Ragged(0, (0, 3, 6)),)
        (made * made).sum().backward()
        assert local.grad is not None
        assert torch.equal(local.grad, torch.full((3 * mesh.get_rank(), 2), 4.0))

    run_on_mesh((3,), body)


@pytest.mark.parametrize(
    ("sizes", "placements", "options", "message"),
    [
        (((2, 3), (3, 3), (1, 3), (3, 3)), [Ragged(0), Replicate()], {}, r"got \(3, 3\) at \(0, 1"),
        (((2, 3), (2, 3), (1, 3), (3, 3)), [Ragged(0), Shard(0)], {}, r"expected \(2, 3\) at \(1,"),
        (((2, 3), (2, 3), (1, 4), (1, 4)), [Ragged(0), Replicate()], {}, r"got \(1, 4\) at \(1, 0"),
        (((2, 3), (2, 3), (1,), (1,)), [Ragged(0), Replicate()], {}, "different numbers of dims"),
        (((2,),) * 4, [Ragged(1), Replicate()], {}, "names dim 1"),
        (((2,),) * 4, [Ragged(0), Ragged(0)], {}, "only one axis may cut dim 0"),
        (((2,),) * 4, [Ragged(0), Replicate()], {"shape": (5,)}, "sizes that sum to 5"),
        (((2,),) * 4, [Ragged(0), Replicate()], {"shape": (4, 1)}, "local shapes do not fit"),
        (((2,),) * 4, [Ragged(0), Shard(0, 1)], {}, "orders 0 to 0"),
        (((2,),) * 4, [Ragged(0), Replicate()], {"grad_placements": [Ragged(0)] * 2}, "no sizes"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same(
    sizes: tuple[tuple[int, ...], ...], placements: Any, options: dict[str, Any], message: str
) -> None:
    def body(mesh: DeviceMesh) -> None:
        DTensor.from_local(torch.ones(sizes[mesh.get_rank()]), mesh, placements, **options)

    with pytest.raises(RanksFailed, match=message) as failed:
        run_on_mesh((2, 2), body)
    assert len(failed.value.errors) == 4
    assert {type(error) for error in failed.value.errors.values()} == {PlacementError}
    assert len({str(error) for error in failed.value.errors.values()}) == 1


def test_everything_else_refuses_to_leave_sizes_out() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
        for use in (
            lambda: tensor.redistribute(placements=[Ragged(0)]),
            lambda: tensor.to_local(grad_placements=[Ragged(0)]),
            lambda: distribute_tensor(torch.ones(4, 2), mesh, [Ragged(0)]),
            lambda: zeros(4, 2, device_mesh=mesh, placements=[Ragged(1)]),
        ):
            with pytest.raises(PlacementError, match=r"has no sizes, which only .*from_local may"):
                use()

    run_on_mesh((2,), body)
    with pytest.raises(PlacementError, match="give 2 sizes that sum to 6"):
        Layout(Mesh((2,)), (Ragged(0),), (6,))
    stored = {**Layout(Mesh((2,)), (Shard(0),), (6,)).to_json(), "placements": ["Ragged(0)"]}
    with pytest.raises(PlacementError, match="has no sizes"):
        Layout.from_json(stored)


def test_it_is_a_value_with_a_text_form() -> None:
    assert Ragged(1) == Ragged(1, ()) == parse_placement("Ragged(1)")
    assert str(Ragged(-1)) == "Ragged(-1)"
    assert Ragged(1) != Ragged(1, (0,))
    assert hash(Ragged(1)) == hash(Ragged(1, ()))
    assert Ragged(1).is_shard(1)
    with pytest.raises(PlacementError, match="not a placement"):
        parse_placement("Ragged(1:)")


def test_a_rank_outside_of_the_mesh_cannot_ask() -> None:
    mesh = DeviceMesh("cpu", [0, 1], rank=2)
    with pytest.raises(PlacementError, match="is not in mesh"):
        DTensor.from_local(torch.ones(0), mesh, [Ragged(0)], shape=(3,))
    made = DTensor.from_local(torch.ones(0), mesh, [Ragged(0, (1, 2))], shape=(3,))
    assert made.shape == (3,)
