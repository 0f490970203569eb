"""Faults on demand: each must do what it says, and nothing when it is not asked."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage import (
    Call,
    Delay,
    Fault,
    FaultyStore,
    FlipBit,
    Kill,
    LocalStore,
    MemoryStore,
    RaiseError,
    ReadRequest,
    Rule,
    ShortRead,
    Store,
    TornWrite,
)

from ..conformance import Raw, StoreTests, names, write
from ..test_memory import RawDict

FULL = StorageError(errno.ENOSPC, "no space")


class TestFaultyStoreWithoutFaults(StoreTests):
    @pytest.fixture
    def raw(self) -> Raw:
        return RawDict()

    @pytest.fixture
    def store(self, raw: RawDict) -> Store:
        return FaultyStore(MemoryStore(raw.objects))


def faulty(*rules: Rule) -> FaultyStore:
    """A store with one object, ``x`` = ``bytes(4)``."""
    inner = MemoryStore()
    inner.publish("x", bytes(4), overwrite=False)
    return FaultyStore(inner, rules)


def test_calls_are_logged() -> None:
    store = faulty()
    with store.substore("a").create("y", 3) as stream:
        stream.write(b"12")
        stream.write(b"3")
    store.create("z", 1).abort()
    store.publish("p", b"1234", overwrite=True)
    store.read("x", 1, 3)
    store.read_into("x", [ReadRequest(0, bytearray(1)), ReadRequest(2, bytearray(2))])
    store.exists("x")
    list(store.list("a"))
    store.delete(["x", "p"])
    assert [(call.op, call.name, call.size) for call in store.calls] == [
        ("create", "a/y", 3),
        ("write", "a/y", 2),
        ("write", "a/y", 1),
        ("close", "a/y", 0),
        ("create", "z", 1),
        ("abort", "z", 0),
        ("publish", "p", 4),
        ("read", "x", 2),
        ("read_into", "x", 3),
        ("stat", "x", 0),
        ("list", "a", 0),
        ("delete", "x", 0),
        ("delete", "p", 0),
    ]
    assert [call.number for call in store.calls] == list(range(1, 14))


def test_error_at_a_call_number() -> None:
    store = faulty(Rule(RaiseError(FULL), nth=2))
    store.stat("x")
    with pytest.raises(StorageError) as caught:
        store.stat("x")
    assert caught.value is FULL
    store.stat("x")


def test_error_by_operation_and_name() -> None:
    store = faulty(Rule(RaiseError(FULL), op="re*", name="data/*", nth=2))
    store.publish("data/y", b"12", overwrite=True)
    store.read("x")
    store.read("data/y")
    with pytest.raises(StorageError, match="no space"):
        store.read_into("data/y", [ReadRequest(0, bytearray(1))])


def test_the_first_matching_rule_decides() -> None:
    store = faulty(Rule(FlipBit(0), op="read", nth=1), Rule(FlipBit(1), op="read"))
    assert store.read("x")[0] == 1
    assert store.read("x")[0] == 2


def test_lost_response() -> None:
    store = faulty(Rule(RaiseError(FULL, after_effect=True), op="publish"))
    with pytest.raises(StorageError, match="no space"):
        store.publish("y", b"there", overwrite=False)
    assert store.read("y") == b"there"


def test_failing_write_leaves_nothing() -> None:
    store = faulty(Rule(RaiseError(FULL), op="write", nth=2))
    with pytest.raises(StorageError, match="no space"):
        two_writes(store)
    assert names(store) == ["x"]
    assert [call.op for call in store.calls] == ["create", "write", "write", "abort", "list"]


def two_writes(store: Store) -> None:
    with store.create("y", 2) as stream:
        stream.write(b"1")
        stream.write(b"2")


def test_failing_clean_up_does_not_hide_the_error() -> None:
    again = StorageError("cannot clean up")
    store = faulty(Rule(RaiseError(FULL), op="write"), Rule(RaiseError(again), op="abort"))
    with pytest.raises(StorageError, match="no space") as caught:
        two_writes(store)
    assert "cannot clean up" in caught.value.__notes__[0]


def test_torn_write() -> None:
    store = faulty(Rule(TornWrite(FULL, keep=2), op="publish"))
    with pytest.raises(StorageError, match="no space"):
        store.publish("y", b"1234", overwrite=False)
    assert store.read("y") == b"12"


@pytest.mark.parametrize(("bit", "expected"), [(0, "01000000"), (9, "00020000"), (-1, "00000080")])
def test_flipped_bit(bit: int, expected: str) -> None:
    store = faulty(Rule(FlipBit(bit), op="read*"))
    assert store.read("x").hex() == expected
    first, second = bytearray(1), bytearray(3)
    store.read_into("x", [ReadRequest(0, first), ReadRequest(1, second)])
    assert (first + second).hex() == expected
    assert store.read("x", 0, 0) == b""


def test_short_read() -> None:
    store = faulty(Rule(ShortRead(2), op="read*"))
    assert store.read("x") == bytes(2)
    first, second = bytearray(b"aa"), bytearray(b"bb")
    store.read_into("x", [ReadRequest(0, first), ReadRequest(2, second)])
    assert (first, second) == (bytes(2), b"bb")


def test_delay() -> None:
    store = faulty(Rule(Delay(0.02), op="stat"))
    begin = time.monotonic()
    store.stat("x")
    assert time.monotonic() - begin >= 0.02


def test_a_plan_of_ones_own() -> None:
    class Count(Fault):
        seen = 0

        def before(self) -> None:
            self.seen += 1

    fault = Count()

    def plan(call: Call) -> Fault | None:
        return fault if call.number % 2 else None

    store = FaultyStore(MemoryStore(), plan)
    for _ in range(5):
        store.exists("x")
    assert fault.seen == 3


KILLED = """
import sys
from dtckpt.storage import FaultyStore, Kill, LocalStore, Rule
store = FaultyStore(LocalStore(sys.argv[1]), [Rule(Kill(), op=sys.argv[2])])
with store.create("d/x", 2) as stream:
    stream.write(b"1")
    stream.write(b"2")
"""


@pytest.mark.parametrize("op", ["write", "close"])
def test_kill_leaves_no_object(tmp_path: Path, op: str) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, tmp_path, op], check=False)
    assert run.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert names(store) == []
    assert len(list(store.leftovers("d"))) == 1
    store.delete(store.leftovers())
    assert list(tmp_path.iterdir()) == []
    write(store, "d/x", b"12")


def test_kill_is_sent_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))  # pyright: ignore
    store = faulty(Rule(Kill(after_effect=True), op="publish"))
    store.publish("y", b"1", overwrite=True)
    assert sent == [signal.SIGKILL]
