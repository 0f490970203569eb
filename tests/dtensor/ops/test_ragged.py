"""All cases of operators once more, on random ragged, ordered and mixed placements."""

from __future__ import annotations

import random

import pytest

from dtckpt.dtensor import DeviceMesh, Partial
from dtckpt.dtensor.geometry.placement import Placement

from ..rank_meshes import run_on_mesh
from ..redistribute.test_redistribute import random_placements
from . import test_attention as test_ops_attention
from . import test_contraction as test_ops_contraction
from . import test_indexing as test_ops_indexing
from . import test_ops
from . import test_reductions as test_ops_reductions
from . import test_views as test_ops_views
from . import test_vision as test_ops_vision
from .op_cases import Case, check, expected_of

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")

CASES: list[Case] = [
    *test_ops.CASES,
    *test_ops_attention.CASES,
    *test_ops_contraction.PRODUCTS,
    *test_ops_contraction.LINALG,
    *test_ops_indexing.CASES,
    *(case for group in test_ops_reductions.GROUPS.values() for case in group),
    *test_ops_views.CASES,
    *test_ops_vision.POOLS,
    *test_ops_vision.PADS,
]
MESHES = [(3,), (2, 2), (2, 1, 2)]


@pytest.mark.parametrize("part", range(6))
def test_any_placements(part: int) -> None:
    """Every case is tried on one mesh, which is another one for its neighbours in the list."""
    mesh_shape, cases = MESHES[part % 3], CASES[part::6]
    expected = [expected_of(case) for case in cases]

    def body(mesh: DeviceMesh) -> None:
        for case, wanted in zip(cases, expected, strict=True):
            rng = random.Random(f"{case.name} {part}")
            choice = [placements(rng, mesh.shape, shape) for shape in case.shapes]
            check(case, mesh, [choice], wanted)

    run_on_mesh(mesh_shape, body)


def placements(
    rng: random.Random, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Random ones, of which terms are those of sums: inputs may be whole numbers."""
    found = random_placements(rng, mesh_shape, shape)
    return tuple(Partial() if p.is_partial() else p for p in found)
