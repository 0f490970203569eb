"""The commit protocol: what is committed can be loaded, and what was committed stays."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.places import MANIFEST
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.errors import (
    CheckpointError,
    LayoutMismatch,
    NotCommitted,
    ObjectExists,
    ObjectNotFound,
    RankFailed,
    StorageError,
)
from dtckpt.storage import Fault, FaultyStore, FsspecStore, MemoryStore, RaiseError, Rule, Store

from ...ranks import RanksFailed, run_ranks

SIZE = 3


def state(value: float = 1.0) -> dict[str, Any]:
    """Something to write for every rank."""
    return {f"t{i}": torch.full((50,), value) for i in range(2 * SIZE)}


class Interrupt:
    """Has the n-th of its rank's messages take effect and then raises, as Ctrl-C would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[int, int] = {}
        self.error: BaseException = KeyboardInterrupt()
        consult = GroupRanks.consult

        def interrupted(ranks: GroupRanks, *args: Any, **options: Any) -> bytes:
            decision = consult(ranks, *args, **options)
            if ranks.rank in self.left:
                self.left[ranks.rank] -= 1
                if self.left[ranks.rank] == 0:
                    raise self.error
            return decision

        monkeypatch.setattr(GroupRanks, "consult", interrupted)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankFailed("Connection closed by peer")])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("victim", [0, SIZE - 1])
def test_an_interrupt_after_any_message_leaves_a_checkpoint_that_loads(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, overwrite: bool, victim: int
) -> None:
    """A rank that does not know whether the others commit must not delete what they need."""
    interrupt = Interrupt(monkeypatch)
    interrupt.error = error
    for nth in range(1, 4):
        store = MemoryStore()
        target = "step-1" if overwrite else "step-2"
        dcp.save(state(1.0), store.substore("step-1"))
        place = store.substore(target)
        interrupt.left = {victim: nth}

        def save(rank: int, group: Any, place: Store = place) -> None:
            silence = timedelta(seconds=5)
            dcp.save(state(2.0), place, process_group=group, overwrite=overwrite, timeout=silence)

        with pytest.raises(RanksFailed) as failure:
            run_ranks(SIZE, save)
        assert victim in failure.value.errors
        assert interrupt.left == {victim: 0}
        interrupt.left = {}
        newest = dcp.latest(store)
        assert newest is not None
        into = state(0.0)
        dcp.load(into, store.substore(newest.name))
        assert {float(t[0]) for t in into.values()} <= {1.0, 2.0}
        assert len({float(t[0]) for t in into.values()}) == 1
        if not overwrite:
            dcp.load(into, store.substore("step-1"))
            assert into["t0"][0] == 1.0


def test_ranks_that_do_not_share_storage_commit_nothing() -> None:
    def save(rank: int, group: Any) -> None:
        store = FaultyStore(MemoryStore(objects[rank]))
        store.url = "disk://of-this-node"
        dcp.save(state(), store, process_group=group)

    objects: list[dict[str, bytes]] = [{} for _ in range(SIZE)]
    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, save)
    for error in failure.value.errors.values():
        assert "storage that they share" in str(error)
    assert objects == [{}] * SIZE, "and every rank took its file away"


def test_ranks_with_different_paths_are_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, lambda r, g: dcp.save(state(), tmp_path / f"at-{r}", process_group=g))
    for error in failure.value.errors.values():
        assert isinstance(error, LayoutMismatch)
        assert "not given the same checkpoint_id: ranks 1-2" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_different_paths_to_load_from_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dcp.save(state(), tmp_path / name)
    (tmp_path / "same").symlink_to(tmp_path / "a")

    def load(rank: int, group: Any, other: str) -> None:
        into = state(0.0)
        try:
            dcp.load(into, tmp_path / ("a" if rank == 0 else other), process_group=group)
        finally:
            loaded[rank] = float(into["t0"][0])

    loaded: dict[int, float] = {}
    for other, what in (("b", "another checkpoint"), ("none", "no checkpoint")):
        with pytest.raises(RanksFailed) as failure:
            run_ranks(SIZE, lambda rank, group, other=other: load(rank, group, other))
        for error in failure.value.errors.values():
            assert isinstance(error, LayoutMismatch)
            assert f"/{other}, where {what} is, and rank 0 has {tmp_path}/a" in str(error)
        assert set(loaded.values()) == {0.0}
    run_ranks(SIZE, lambda rank, group: load(rank, group, "same"))
    assert set(loaded.values()) == {1.0}


@pytest.mark.parametrize("kind", ["same", "first only", "different"])
def test_ranks_with_different_metadata(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        given = {"same": 0, "first only": None if rank else 0, "different": rank}[kind]
        dcp.save(state(), store, metadata=given, process_group=group)

    run_ranks(SIZE, save)
    assert dcp.open(store).metadata == 0
    told = "ranks 1-2 gave other metadata than rank 0, whose is kept"
    assert (told in caplog.text) == (kind == "different")


def test_a_failure_to_clean_up_is_no_failure_to_save() -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    broken = Rule(RaiseError(ValueError("odd name")), op="delete")
    dcp.save(state(2.0), FaultyStore(store, [broken]), overwrite=True)
    into = state(0.0)
    dcp.load(into, store)
    assert into["t0"][0] == 2.0


@pytest.mark.parametrize("moment", ["close", "publish"])
def test_the_loser_of_a_race_takes_its_files_away(moment: str) -> None:
    store = MemoryStore()

    class Winner(Fault):
        def before(self) -> None:
            dcp.save(state(2.0), store)

    with pytest.raises(CheckpointError, match="another save committed"):
        dcp.save(state(3.0), FaultyStore(store, [Rule(Winner(), op=moment)]))
    assert len(list(store.list("data"))) == 1
    into = state(0.0)
    dcp.load(into, store)
    assert into["t0"][0] == 2.0


def test_a_lost_manifest_is_noticed_before_old_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://dtckpt-lost-manifest/step-1"
    dcp.save(state(1.0), url)
    put = FsspecStore._put  # pyright: ignore[reportPrivateUsage]

    def lose(self: FsspecStore, name: str, data: bytes, **conditions: Any) -> None:
        if name != MANIFEST:
            put(self, name, data, **conditions)

    monkeypatch.setattr(FsspecStore, "_put", lose)
    with pytest.raises(StorageError, match="what was there before still is although"):
        dcp.save(state(2.0), url, overwrite=True)
    into = state(0.0)
    dcp.load(into, url)
    assert into["t0"][0] == 1.0


def test_latest_survives_a_checkpoint_that_goes_while_it_looks() -> None:
    store = MemoryStore()
    for step in (1, 2):
        dcp.save({"step": step}, store.substore(f"step-{step}"))

    class Pruned(Fault):
        def before(self) -> None:
            store.delete(["step-2/manifest.json"])

    faulty = FaultyStore(store, [Rule(Pruned(), op="read", name="*step-2/manifest.json")])
    found = dcp.latest(faulty)
    assert found is not None
    assert found.number == 1


def test_latest_finds_what_came_while_all_that_was_listed_went() -> None:
    store = MemoryStore()
    dcp.save({"step": 1}, store.substore("step-1"))

    class Rotated(Fault):
        def before(self) -> None:
            dcp.save({"step": 2}, store.substore("step-2"))
            dcp.delete(store.substore("step-1"))

    rotated = Rule(Rotated(), op="read", name="*step-1/manifest.json", nth=1)
    found = dcp.latest(FaultyStore(store, [rotated]))
    assert found is not None
    assert found.number == 2


def test_latest_of_what_is_only_listed_is_an_error() -> None:
    class Listed(Fault):
        def before(self) -> None:
            raise ObjectNotFound("no object")

    store = MemoryStore()
    dcp.save({"step": 1}, store.substore("step-1"))
    rule = Rule(Listed(), op="stat", name="*manifest.json")
    again = Rule(Listed(), op="read", name="*manifest.json")
    with pytest.raises(StorageError, match="step-1 is listed, but"):
        dcp.latest(FaultyStore(store, [rule, again]))
    dcp.delete(store.substore("step-1"))
    assert dcp.latest(store) is None


def test_an_exception_that_cannot_be_described_still_reaches_all() -> None:
    class Odd(Exception):
        overwritten = True

        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Own(StorageError):
        """An error of a user's store."""

    for raised, expected in ((Odd(), "Odd"), (Own("quota exceeded"), "Own: quota exceeded")):
        store = MemoryStore()

        def save(
            rank: int, group: Any, error: Exception = raised, target: MemoryStore = store
        ) -> None:
            rules = [Rule(RaiseError(error), op="create")] if rank == 1 else []
            dcp.save(state(), FaultyStore(target, rules), process_group=group)

        with pytest.raises(RanksFailed) as failure:
            run_ranks(2, save)
        for error in failure.value.errors.values():
            assert isinstance(error, CheckpointError)
            assert not isinstance(error, RankFailed)
            assert expected in str(error)
            assert isinstance(error, StorageError) == ("quota" in expected)


def test_a_rank_outside_of_the_group_is_told_so() -> None:
    with pytest.raises(CheckpointError, match="not a member"):
        dcp.save({}, MemoryStore(), process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(NotCommitted):
        dcp.load({}, MemoryStore())


class Late(Fault):
    """The store does not answer, and carries the request out when it likes."""

    def __init__(self) -> None:
        self.error = StorageError("timed out waiting for the reply")
        self.kept = b""

    def sent(self, data: memoryview) -> memoryview:
        self.kept = bytes(data)
        raise self.error


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_arrives_late_finds_its_data(overwrite: bool) -> None:
    store = MemoryStore()
    place = store.substore("step-1")
    if overwrite:
        dcp.save(state(1.0), place)
    before = sorted(info.name for info in place.list())
    late = Late()

    def save(_: int, group: Any) -> None:
        faulty = FaultyStore(place, [Rule(late, op="publish", name=MANIFEST)])
        dcp.save(state(2.0), faulty, process_group=group, overwrite=overwrite)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, save)
    for error in failure.value.errors.values():
        assert isinstance(error, StorageError)
        assert not error.is_certain
    assert len(list(place.list())) == len(before) + SIZE, "every rank has left its file"
    assert (dcp.latest(store) is not None) == overwrite
    place.publish(MANIFEST, late.kept, overwrite=overwrite)
    into = state(0.0)
    dcp.load(into, place)
    assert into["t0"][0] == 2.0


@pytest.mark.parametrize("error", [StorageError("no reply"), OSError(5, "gone")])
def test_a_commit_whose_reply_is_lost_keeps_its_data(error: Exception) -> None:
    place = MemoryStore()

    def save(_: int, group: Any) -> None:
        lost = Rule(RaiseError(error, after_effect=True), op="publish", name=MANIFEST)
        dcp.save(state(2.0), FaultyStore(place, [lost]), process_group=group)

    with pytest.raises(RanksFailed):
        run_ranks(SIZE, save)
    into = state(0.0)
    dcp.load(into, place)
    assert into["t0"][0] == 2.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_was_asked_for_twice_is_our_own(overwrite: bool) -> None:
    place = MemoryStore()
    if overwrite:
        dcp.save(state(1.0), place)
    taken = Rule(RaiseError(ObjectExists("taken"), after_effect=True), op="publish", name=MANIFEST)
    dcp.save(state(2.0), FaultyStore(place, [taken]), overwrite=overwrite)
    into = state(0.0)
    dcp.load(into, place)
    assert into["t0"][0] == 2.0
    assert len(list(place.list())) == 2


def test_a_refusal_is_certain_and_leaves_nothing() -> None:
    class Full(Fault):
        def before(self) -> None:
            error = StorageError(28, "No space left on device")
            error.is_certain = True
            raise error

    place = MemoryStore()
    with pytest.raises(StorageError, match="No space left") as caught:
        dcp.save(state(), FaultyStore(place, [Rule(Full(), op="publish")]))
    assert caught.value.is_certain
    assert list(place.list()) == []


def test_the_files_of_a_checkpoint_go_when_it_is_replaced() -> None:
    store = MemoryStore()
    dcp.save(state(1.0), store)
    old = {file.name for file in store.list()}
    dcp.save(state(2.0), store, overwrite=True)
    assert {file.name for file in store.list()} & old == {MANIFEST}


class Altered(Fault):
    """Alters the body on its way, and says that all is well."""

    def sent(self, data: memoryview) -> memoryview:
        return memoryview(bytes(data).replace(b"dtckpt", b"dtckqt"))


def test_an_altered_manifest_is_found_before_what_it_replaces_goes() -> None:
    store = MemoryStore()
    dcp.save(state(1.0), store)
    once = Rule(Altered(), op="publish", name=MANIFEST, nth=1)
    with pytest.raises(
        StorageError, match="other bytes are there although the store has confirmed"
    ):
        dcp.save(state(2.0), FaultyStore(store, [once]), overwrite=True)
    into = state(0.0)
    dcp.load(into, store)
    assert into["t0"][0] == 1.0, "what was there was put back"
    new = MemoryStore()
    always = Rule(Altered(), op="publish", name=MANIFEST)
    with pytest.raises(StorageError, match="other bytes are there although") as caught:
        dcp.save(state(2.0), FaultyStore(new, [always]))
    assert not caught.value.is_certain
    dcp.save(state(3.0), new, overwrite=True)
    dcp.load(into, new)
    assert into["t0"][0] == 3.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_swallowed_manifest_is_told_as_such(
    overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    if overwrite:
        dcp.save(state(1.0), store)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "publish", all_but_the_manifest)
        patch.setattr(MemoryStore, "replace", lambda *_, **__: None)  # pyright: ignore
        what = "what was there before still is" if overwrite else "nothing is there"
        with pytest.raises(StorageError, match=f"{what} although the store has confirmed"):
            dcp.save(state(2.0), store, overwrite=overwrite)
    if overwrite:
        into = state(0.0)
        dcp.load(into, store)
        assert into["t0"][0] == 1.0


PUBLISH = MemoryStore.publish


def all_but_the_manifest(store: MemoryStore, name: str, data: bytes, *, overwrite: bool) -> None:
    """Publish as a ``MemoryStore`` does, but swallow the manifest."""
    if name != MANIFEST:
        PUBLISH(store, name, data, overwrite=overwrite)
