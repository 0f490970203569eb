"""The operators that dtensor/ops/README.md adds run as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtckpt.dtensor.ops.engine.table import DECOMPOSITIONS, RULES

README = Path(__file__).parents[3] / "dtensor" / "ops" / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\b(?:engine/)?(\w+\.py)\b")


@pytest.fixture
def tables() -> Iterator[None]:
    """Leave the tables as they were."""
    before = [(table, dict(table)) for table in (RULES, DECOMPOSITIONS)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("tables")
def test_worked_example() -> None:
    blocks = BLOCK.findall(README.read_text())
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {}
    for block in blocks:  # as one module, built up in the order of the page
        exec(compile(block, str(README), "exec"), namespace)


def test_files_of_the_engine_are_listed() -> None:
    listed = {*FILE.findall(README.read_text()), "__init__.py"}
    assert {path.name for path in (README.parent / "engine").glob("*.py")} <= listed
