"""A part of the matrix of optimizers, in which each two of its values meet."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest

from .cells import MESHES, MOMENTS, pairwise_cells
from .every import KINDS
from .models import PARALLELISMS
from .running import Result, results

NAMES = [kind.name for kind in KINDS]


def test_each_two_values_meet() -> None:
    cells = [astuple(cell) for each in PARALLELISMS for cell in pairwise_cells(NAMES, each)]
    values = (NAMES, PARALLELISMS, MESHES, MOMENTS)
    for one, other in itertools.combinations(range(len(values)), 2):
        met = {(cell[one], cell[other]) for cell in cells}
        assert met == {*itertools.product(values[one], values[other])}


@pytest.fixture(scope="module")
def found() -> list[Result]:
    """What came of all cells."""
    return results([cell for each in PARALLELISMS for cell in pairwise_cells(NAMES, each)])


@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_optimizers_are_resumed(found: list[Result], parallelism: str) -> None:
    mine = [result for result in found if result.cell.parallelism == parallelism]
    assert len(mine) == len(NAMES)
    wrong = [f"{result.cell}: {problem}" for result in mine if (problem := result.problem())]
    assert not wrong, "\n".join(wrong)
