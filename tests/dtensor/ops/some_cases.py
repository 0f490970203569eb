"""Cases of operators of all kinds, for placements of which no operator knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtckpt.dtensor import DeviceMesh, Placement, Replicate, Shard

from ..rank_meshes import run_on_mesh
from . import test_contraction, test_indexing, test_ops, test_reductions, test_views
from .op_cases import check, expected_of

CASES = [
    *test_ops.CASES,
    *test_contraction.PRODUCTS,
    *test_indexing.CASES,
    *(case for group in test_reductions.GROUPS.values() for case in group),
    *test_views.CASES,
]


def check_some(
    mesh_shape: tuple[int, ...], cut: Callable[[int], Placement], *, first: int, step: int
) -> None:
    """Check values and gradients of every so manyth case.

    ``cut(dim)`` is the placement of every input along the first axis, of two dims in turn; other
    axes shard their pieces of the first dim.
    """
    cases = CASES[first::step]
    expected = [expected_of(case) for case in cases]
    others = [Shard(0)] * (len(mesh_shape) - 1)

    def placed(dim: int, shape: tuple[int, ...]) -> list[Any]:
        return [cut(dim % len(shape)), *others] if shape else [Replicate()] * len(mesh_shape)

    def body(mesh: DeviceMesh) -> None:
        for case, wanted in zip(cases, expected, strict=True):
            choices = [[placed(dim, shape) for shape in case.shapes] for dim in range(2)]
            check(case, mesh, choices, wanted)

    run_on_mesh(mesh_shape, body)
