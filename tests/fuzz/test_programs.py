"""What the fuzzer has found stays right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtckpt.checkpoint.state.collector import paused_collector

from .comparison import examine
from .executors import Executor
from .programs import FOUND

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, for values that programs have


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with paused_collector():
        yield Executor()


@pytest.mark.parametrize("name", list(FOUND))
def test_program_is_as_on_one_device(name: str, executor: Executor) -> None:
    verdict = examine(FOUND[name], executor)
    assert verdict.finding is None, f"{verdict.finding}\n{FOUND[name]}"
    assert verdict.refusal is None, verdict.refusal
