"""A store is tried by one rank, and all of a job get its answer."""

from __future__ import annotations

from typing import Any

import pytest

import dtckpt.checkpoint as ckpt
from dtckpt.errors import LayoutMismatch, StorageError
from dtckpt.storage import FaultyStore, MemoryStore, RaiseError, Rule, probing

from ..ranks import RanksFailed, run_ranks


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_found", {})


def test_one_rank_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def counted(store: Any, *, write: bool) -> Any:
        tried.append(store)
        return probing.capabilities(store, write=write)

    monkeypatch.setattr("dtckpt.checkpoint.probing.tried", counted)
    store = MemoryStore()
    found = run_ranks(4, lambda _, group: ckpt.capabilities(store, process_group=group))
    assert len(tried) == 1
    assert found == [found[0]] * 4
    assert found[0].conditional_create
    assert found[0].url == store.url


def test_its_error_is_everyones() -> None:
    store = FaultyStore(MemoryStore(), [Rule(RaiseError(StorageError("full")), op="publish")])
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, lambda _, group: ckpt.capabilities(store, process_group=group))
    assert {type(error) for error in caught.value.errors.values()} == {StorageError}
    assert set(caught.value.errors) == {0, 1}


def test_of_one_place(tmp_path: Any) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(
            2, lambda rank, group: ckpt.capabilities(tmp_path / str(rank), process_group=group)
        )
    assert {type(error) for error in caught.value.errors.values()} == {LayoutMismatch}


def test_alone(tmp_path: Any) -> None:
    assert ckpt.capabilities(tmp_path, no_dist=True, write=False).conditional_create is None
