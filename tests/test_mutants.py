"""Every hand-written mutant can still be made: what it changes stands in its file, once."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import tests.mutants
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[1]
MUTANTS = [
    mutant
    for info in pkgutil.iter_modules(tests.mutants.__path__)
    if not info.name.startswith("__")
    for mutant in getattr(importlib.import_module(f"tests.mutants.{info.name}"), "MUTANTS", ())
]


def test_there_are_mutants() -> None:
    assert len(MUTANTS) > 90
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_code_that_a_mutant_changes_is_there(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)
