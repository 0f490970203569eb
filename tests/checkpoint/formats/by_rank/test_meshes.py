"""Meshes as releases of torch have pickled them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dtckpt.checkpoint.formats.by_rank.meshes import MeshObject, mesh_of
from dtckpt.dtensor import Mesh


def mesh(**state: Any) -> Any:
    made = MeshObject()
    made.__setstate__(state)
    return made


def table(axes: Any, at: tuple[int, ...], rank: int) -> Any:
    return mesh(
        _layout=SimpleNamespace(**axes),
        _mesh_dim_names=("a", "b", "c")[: len(at)],
        _flatten_rank_map=(10, 11, 12, 13, 14, 15, 16, 17),
        _rank=rank,
        _coordinate_on_dim=at,
    )


def axis(size: Any, step: Any) -> SimpleNamespace:
    return SimpleNamespace(shape=size, stride=step)


def test_a_tensor_of_ranks_as_up_to_torch_2_9() -> None:
    told = mesh(
        mesh=SimpleNamespace(shape=(2, 2)),
        mesh_dim_names=("dp", "tp"),
        _flatten_mesh_list=(0, 2, 1, 3),
    )
    assert mesh_of(told) == Mesh((2, 2), ("dp", "tp"), (0, 2, 1, 3))


@pytest.mark.parametrize(
    ("axes", "at", "rank", "shape", "ranks"),
    [
        ({"shape": (8,), "stride": (1,)}, (3,), 13, (8,), tuple(range(10, 18))),
        ({"shape": (2, 4), "stride": (4, 1)}, (1, 0), 14, (2, 4), tuple(range(10, 18))),
        ({"shape": 2, "stride": 4}, (1,), 16, (2,), (12, 16)),
        ({"shape": ((2, 2),), "stride": ((4, 1),)}, (3,), 17, (4,), (12, 13, 16, 17)),
        ({"axes": [axis((2,), (4,)), axis((), ())]}, (0, 0), 11, (2, 1), (11, 15)),
        ({"axes": [axis((2, 2), (4, 1))]}, (2,), 14, (4,), (10, 11, 14, 15)),
    ],
)
def test_a_table_of_a_larger_mesh(
    axes: Any, at: tuple[int, ...], rank: int, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    found = mesh_of(table(axes, at, rank))
    assert (found.shape, found.all_ranks()) == (shape, ranks)


@pytest.mark.parametrize(
    "axes",
    [
        {"axes": [axis((1 << 20,), (0,)), axis((1 << 20,), (0,))]},
        {"axes": [axis((2,), (40,))]},
        {"axes": [axis((2,), ("1",))]},
    ],
)
def test_meshes_that_are_none_are_refused(axes: Any) -> None:
    with pytest.raises((ValueError, IndexError)):
        mesh_of(table(axes, (0,) * len(axes["axes"]), 10))
