"""torch's placements, and the protocol of torch.distributed.checkpoint."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# torch does not mark what its checkpoint package exports.

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import placement_types

from dtckpt.dtensor import (
    DeviceMesh,
    Layout,
    Mesh,
    Packed,
    Partial,
    Ragged,
    Replicate,
    Shard,
    compute_local_shape_and_global_offset,
    distribute_tensor,
)
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.dtensor.geometry.placement import Placement
from dtckpt.dtensor.mesh.torch_layouts import (
    layout_from_torch,
    placements_from_torch,
    placements_to_torch,
)
from dtckpt.dtensor.state_dicts import teach_state_dicts
from dtckpt.errors import PlacementError

from ...processes import run_processes
from ..rank_meshes import run_on_mesh, scattered

# Private, and gone in some torch: then there is nothing to translate.
Strided: Any = getattr(placement_types, "_StridedShard", None)


def test_plain_placements_pass_both_ways() -> None:
    ours = (Shard(1), Replicate(), Partial("max"))
    theirs = (torch_tensor.Shard(-1), torch_tensor.Replicate(), torch_tensor.Partial("max"))
    assert placements_from_torch(theirs, (2, 2, 2), 2) == ours
    assert placements_from_torch(ours, (2, 2, 2), 2) == ours
    back = placements_to_torch(Layout(Mesh((2, 2, 2)), ours, (4, 4)))
    assert back == (torch_tensor.Shard(1), *theirs[1:])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Shard(1), torch_tensor.Shard(1)),
        (Shard(-1), torch_tensor.Shard(-1)),
        (Replicate(), torch_tensor.Replicate()),
        (Partial("max"), torch_tensor.Partial("max")),
    ],
)
def test_a_placement_equals_torchs_of_the_same_meaning(ours: Any, theirs: Any) -> None:
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert {ours} == {theirs}
    others: list[Any] = [Shard(0), Shard(1, 0), Partial(), Ragged(1, (2,)), torch_tensor.Shard(0)]
    for other in (*others, torch_tensor.Partial(), Strided(1, split_factor=2), "S(1)", None):
        assert ours != other
        assert other != ours
    assert ours.is_shard() == theirs.is_shard()
    assert ours.is_replicate() == theirs.is_replicate()
    assert pickle.loads(pickle.dumps(ours)) == theirs
    assert not isinstance(ours, torch_tensor.Shard | torch_tensor.Replicate | torch_tensor.Partial)


@pytest.mark.parametrize("size", [0, 1, 5, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_tensors_are_split_as_torch_splits(size: int, padded: bool) -> None:
    whole = torch.arange(2.0 * size).view(2, size)
    found, lacking = Shard(1)._split_tensor(whole, 3, with_padding=padded)
    theirs: Any = torch_tensor.Shard(1)
    wanted, padding = theirs._split_tensor(whole, 3, with_padding=padded)
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]
    assert lacking == padding


def test_modules_have_torchs_names() -> None:
    from dtckpt.dtensor.debug import visualize_sharding
    from dtckpt.dtensor.mesh.device_mesh import init_device_mesh
    from dtckpt.dtensor.placement_types import Shard as FromThere

    assert FromThere is Shard
    assert callable(init_device_mesh)
    assert callable(visualize_sharding)
    tensor = DTensor.from_local(torch.ones(2, 3), DeviceMesh("cpu", [0], rank=0), [Shard(1)])
    spec: Any = tensor._spec
    assert spec.dim_map == [-1, 0]
    assert spec.device_mesh is tensor.device_mesh
    assert tensor.wait() is tensor


def test_fsdp_inside_tensor_parallel() -> None:
    theirs = (Strided(0, split_factor=2), torch_tensor.Shard(0))
    ours = placements_from_torch(theirs, (2, 2), 1)
    assert ours == (Shard(0, order=1), Shard(0, order=0))
    assert placements_to_torch(Layout(Mesh((2, 2)), ours, (8,))) == theirs


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 3, 4), (3, 1, 2)])
def test_every_order_survives_the_split_factors(
    shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    placements: tuple[Placement, ...] = tuple(Shard(0, i) for i in order)
    layout = Layout(Mesh(shape), placements, (48,))
    decoded = placements_from_torch(placements_to_torch(layout), shape, 1)
    again = Layout(Mesh(shape), decoded, (48,))
    for coordinate in layout.mesh.coordinates():
        assert again.box(coordinate) == layout.box(coordinate)
    assert math.prod(again.grid) == math.prod(shape)


def chunks(indices: list[int], count: int) -> list[list[int]]:
    step = max(1, -(-len(indices) // count))
    return [indices[i * step : (i + 1) * step] for i in range(count)]


def held_by_torch(
    size: int, mesh: tuple[int, ...], at: tuple[int, ...], placements: tuple[Any, ...]
) -> list[int]:
    """Return the indices of dim 0 that a coordinate holds: torch cuts from left to right."""
    held = list(range(size))
    for count, here, placement in zip(mesh, at, placements, strict=True):
        if placement.dim == 0:
            parts = chunks(held, getattr(placement, "split_factor", 1))
            held = [index for part in parts for index in chunks(part, count)[here]]
    return held


class ShardOrder(NamedTuple):
    tensor_dim: int
    mesh_dims: tuple[int, ...]


FACTORS = {
    "alone": (Strided(0, split_factor=3),),
    "more than there are": (Strided(0, split_factor=7),),
    "beside another dim": (torch_tensor.Shard(1), Strided(0, split_factor=2)),
    "cut again": (Strided(0, split_factor=3), torch_tensor.Shard(0)),
    "cut again and again": (
        *(Strided(0, split_factor=4), torch_tensor.Shard(0)),
        torch_tensor.Shard(0),
    ),
    "of another order": (Strided(0, split_factor=2), torch_tensor.Shard(0)),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("size", [0, 1, 5, 6, 12, 13, 24, 29])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_factors_that_are_no_order_are_parts_of_a_dim(name: str, size: int, count: int) -> None:
    placements: Any = FACTORS[name]
    shape = (count, 2, 3)[: len(placements)]
    orders = (ShardOrder(tensor_dim=0, mesh_dims=(0, 1)),)
    of_view = SimpleNamespace(use_strided_shard_as_shard_order=False, shard_order=orders)
    tensor: Any = SimpleNamespace(
        device_mesh=DeviceMesh("cpu", Mesh(shape), rank=0),
        placements=placements,
        shape=(size, 6),
        _spec=of_view if name == "of another order" else None,
    )
    layout = layout_from_torch(tensor)
    for at in layout.mesh.coordinates():
        found = [
            index
            for box, _ in layout.parts(at)
            for index in range(box.offsets[0], box.offsets[0] + box.sizes[0])
        ]
        assert found == held_by_torch(size, shape, at, placements)
    if name != "of another order":
        assert placements_to_torch(layout) == placements


def test_what_neither_side_can_say_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"no axes to its right make 3 pieces.*Packed\(0, "):
        placements_from_torch((Strided(0, split_factor=3), torch_tensor.Shard(0)), (2, 2), 1)
    for both in (
        (Strided(0, split_factor=2), Strided(0, split_factor=2)),
        (torch_tensor.Shard(0), Strided(0, split_factor=2)),
    ):
        with pytest.raises(PlacementError, match="shard_placement_fn"):
            placements_from_torch(both, (2, 2), 1)
    with pytest.raises(PlacementError, match="no packed placement"):
        placements_to_torch(Layout(Mesh((2,)), (Packed(0, (1, 3)),), (4,)))
    with pytest.raises(PlacementError, match="no ragged placement"):
        placements_to_torch(Layout(Mesh((2,)), (Ragged(0, (1, 3)),), (4,)))
    with pytest.raises(PlacementError, match="order of cuts of dim 0 twice"):
        placements_from_torch((Strided(0, split_factor=2), Shard(0, 1)), (2, 2), 1)
    masked: Any = getattr(placement_types, "_MaskPartial", None)
    if masked is not None:
        with pytest.raises(PlacementError, match="does not say what a rank holds"):
            placements_from_torch((masked(),), (2,), 1)


def test_without_the_private_placement_orders_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("dtckpt.dtensor.mesh.torch_layouts._STRIDED", None)
    layout = Layout(Mesh((2, 2)), (Shard(0, 1), Shard(0, 0)), (8,))
    with pytest.raises(PlacementError, match="no placement for the shard order"):
        placements_to_torch(layout)


def test_checkpoint_protocol() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.arange(15.0).view(5, 3), mesh, [Shard(0), Shard(1)])
        here = mesh.get_coordinate()
        assert here is not None
        box = tensor.global_layout.box(here)
        (chunk,) = tensor.__create_chunk_list__()
        assert (tuple(chunk.offsets), tuple(chunk.sizes)) == (box.offsets, box.sizes)
        (item,) = tensor.__create_write_items__("w", tensor)
        assert item.index == MetadataIndex("w", chunk.offsets)
        assert item.tensor_data is not None
        assert item.tensor_data.size == (5, 3)
        shard = tensor.__get_tensor_shard__(item.index)
        assert shard.data_ptr() == tensor.to_local().data_ptr()
        with pytest.raises(PlacementError, match="no chunk at offset"):
            tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size((1, 1))))
        partial = scattered(torch.ones(3), mesh, [Partial(), Replicate()])
        with pytest.raises(ValueError, match="has no values before it is reduced"):
            partial.__create_chunk_list__()
        if here == (1, 0):
            small = scattered(torch.ones(1), mesh, [Shard(0), Replicate()])
            assert small.__create_chunk_list__() == []

    run_on_mesh((2, 2), body)


def test_a_job_of_four_processes(tmp_path: Path) -> None:
    run_processes("tests.dtensor.job_ranks", 4, str(tmp_path))


def test_a_torch_without_the_helpers_for_state_dicts_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr("dtckpt.dtensor.state_dicts.state_dict_helpers", {}.get)
    with pytest.warns(UserWarning, match="may come back as shards"):
        teach_state_dicts(DTensor, distribute_tensor)


def test_the_part_of_a_rank() -> None:
    def body(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        theirs = (torch_tensor.Shard(0), torch_tensor.Shard(-1))
        mine = compute_local_shape_and_global_offset((5, 3), mesh, theirs)
        assert mine == compute_local_shape_and_global_offset((5, 3), mesh, (Shard(0), Shard(1)))
        return mine

    assert run_on_mesh((2, 2), body)[3] == ((2, 1), (3, 2))
    outside = DeviceMesh("cpu", [0, 1], rank=7)
    assert compute_local_shape_and_global_offset((5,), outside, [Shard(0)]) == ((0,), ())
