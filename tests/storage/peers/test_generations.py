"""Which objects may go when a newer checkpoint is committed, and when there is no room."""

from __future__ import annotations

import pytest

from dtckpt.checkpoint.files.borrowing import MARKS as MARKS_OF_CHECKPOINTS
from dtckpt.checkpoint.files.places import MANIFEST
from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage.peers.agent.generations import COMMIT_NAME, MARKS, Unit, retired, strays
from dtckpt.storage.peers.agent.holdings import Holdings


def held(*names: str) -> dict[str, Unit]:
    """Units of objects that came in this order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for number, name in enumerate(names):
        directory, _, base = name.rpartition("/")
        found.setdefault(directory, []).append((number, base))
    return {
        directory: Unit(
            directory,
            [base for _, base in items],
            items[0][0],
            items[-1][0],
            next((number for number, base in items if base == COMMIT_NAME), None),
            not any(base.endswith(".json") for _, base in items),
        )
        for directory, items in found.items()
    }


def saved(step: str, save: str = "s") -> tuple[str, ...]:
    return f"{step}/data/{save}/0", f"{step}/data/{save}/1", f"{step}/{COMMIT_NAME}"


def test_names_are_those_of_checkpoints() -> None:
    assert COMMIT_NAME == MANIFEST
    assert MARKS == MARKS_OF_CHECKPOINTS


def test_older_ones_go_with_all_below_them() -> None:
    units = held(*saved("r/step-1"), *saved("r/step-2"), *saved("q/step-1"), "r/other/x")
    assert set(retired(units, "r/step-2", (), 1)) == {"r/step-1", "r/step-1/data/s"}
    assert retired(units, "r/step-2", (), 2) == []
    assert retired(units, "r/step-1", (), 1) == [], "a newer one is there"
    assert retired(units, "r/other", (), 1) == retired(units, "", (), 1) == []


def test_names_that_begin_alike_are_others() -> None:
    units = held(*saved("step-1"), *saved("step-10"), *saved("step-2"))
    gone = retired(units, "step-2", (), 2)
    assert set(gone) == {"step-1", "step-1/data/s"}


def test_what_dead_saves_have_left_goes() -> None:
    units = held("step-2/data/dead/0", *saved("step-3"), "step-4/data/new/0")
    assert retired(units, "step-3", (), 1) == ["step-2/data/dead"]
    assert retired(units, "step-3", ("step-2/data/dead",), 1) == [], "still being written"


def test_what_increments_need_stays() -> None:
    base = (*saved("step-1"), f"step-1/{MARKS}/step-2")
    units = held(*base, *saved("step-2"), *saved("step-3"))
    assert retired(held(*base, *saved("step-2")), "step-2", (), 1) == []
    gone = {name.split("/")[0] for name in retired(units, "step-3", (), 1)}
    assert gone == {"step-1", "step-2"}, "nobody who stays needs them"
    chain = held(*base, *saved("step-2"), f"step-2/{MARKS}/step-3", *saved("step-3"))
    assert retired(chain, "step-3", (), 1) == []
    claimed = held(*saved("step-1"), f"step-1/{MARKS}/x.0123456789abcdef.claim", *saved("step-2"))
    assert retired(claimed, "step-2", (), 1) == []


def test_the_root_may_be_a_checkpoint() -> None:
    units = held("data/s/0", COMMIT_NAME, *saved("step-1"))
    assert retired(units, "step-1", (), 1) == []
    assert strays(units, "step-2/data/s", ()) == []


def test_strays_are_those_of_no_checkpoint() -> None:
    units = held("a/data/old/0", *saved("b"), "a/data/new/0", "c/data/x/0")
    assert strays(units, "a/data/new", ()) == ["a/data/old", "c/data/x"]
    assert strays(units, "a/data/new", ("c/data/x",)) == ["a/data/old"]


def write(holdings: Holdings, name: str, size: int) -> None:
    holdings.commit(holdings.reserve(name, size), stamp=1, size=size)


def test_what_others_have_published_stays() -> None:
    units = held("notes.json", "r/pins/step-1.json", "r/step-1/data/s/0", *saved("r/step-2"))
    assert retired(units, "r/step-2", (), 1) == ["r/step-1/data/s"]
    assert strays(units, "r/step-3/data/s", ()) == ["r/step-1/data/s"]
    holdings = Holdings("here", 1000)
    holdings.put("pins/x", b"1", stamp=None, above=0, is_new=True)
    write(holdings, "step-1/data/s/0", 10)
    holdings.put(f"step-1/{COMMIT_NAME}", b"x", stamp=None, above=0, is_new=True)
    assert holdings.retire("step-1", 1) == 0
    with pytest.raises(StorageError, match="are needed"):
        holdings.reserve("step-2/data/s/0", 1000)
    assert len(holdings.list("")) == 3


def test_room_is_made_of_dead_saves_only() -> None:
    holdings = Holdings("here", 1000)
    write(holdings, "step-1/data/a/0", 400)
    holdings.put(f"step-1/{COMMIT_NAME}", b"x", stamp=None, above=0, is_new=True)
    write(holdings, "step-2/data/dead/0", 400)
    write(holdings, "step-2/data/new/0", 400)
    assert [h.name for h in holdings.list("step-2")] == ["step-2/data/new/0"]
    assert holdings.used_bytes == 801
    with pytest.raises(StorageError, match=r"200 bytes are needed, but 199 of 1000 are free"):
        holdings.reserve("step-2/data/new/1", 200)
    assert [h.name for h in holdings.list("step-2")] == ["step-2/data/new/0"]
    holdings.put(f"step-2/{COMMIT_NAME}", b"x", stamp=None, above=0, is_new=True)
    assert holdings.retire("step-2", 1) == 2
    assert holdings.used_bytes == 401
    draft = holdings.reserve("step-3/data/new/1", 200)
    holdings.discard(draft)
    holdings.discard(draft)
    assert holdings.used_bytes == 401


def test_stamps_grow_and_older_ones_do_not_replace() -> None:
    holdings = Holdings("here", 1000)
    first = holdings.put("x", b"1", stamp=None, above=1 << 62, is_new=True)
    assert first == (1 << 62) + 1
    second = holdings.put("x", b"2", stamp=None, above=0, is_new=False)
    assert second == first + 1
    assert holdings.put("x", b"old", stamp=first, above=0, is_new=False) == second
    assert holdings.put("x", b"2", stamp=second, above=0, is_new=True) == second, "asked again"
    with pytest.raises(ObjectExists):
        holdings.put("x", b"3", stamp=second + 1, above=0, is_new=True)
    assert holdings.find("x").read() == b"2"
    with pytest.raises(ObjectExists, match="not the one to be replaced"):
        holdings.swap("x", b"3", stamp=first)
    third = holdings.swap("x", b"3", stamp=second)
    assert third > second
    holdings.delete(["x", "y"], up_to=second)
    assert holdings.find("x").read() == b"3"
    holdings.swap("x", None, stamp=third)
    with pytest.raises(ObjectNotFound):
        holdings.find("x")
    with pytest.raises(ObjectNotFound):
        holdings.swap("x", b"4", stamp=third)
    assert holdings.used_bytes == 0


def test_an_object_takes_no_more_room_than_its_bytes() -> None:
    holdings = Holdings("here", 1000)
    draft = holdings.reserve("a", 900)
    with pytest.raises(ValueError, match="901 bytes of 900"):
        holdings.commit(draft, stamp=1, size=901)
    holdings.commit(draft, stamp=1, size=3)
    assert (holdings.find("a").size, holdings.used_bytes) == (3, 3)
    write(holdings, "b", 997)
