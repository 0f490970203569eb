"""What is held by several hosts, when some of them die."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage import PeersStore, ReadRequest
from dtckpt.storage.peers.client import Peer
from dtckpt.storage.peers.opened import open_object

from ..conformance import names, write
from .hosts import Hosts, hosts

MIB = 1 << 20
BLOB = os.urandom(3 * MIB)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts."""
    with hosts(tmp_path, "a", "b", "c") as made:
        yield made


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts that live as long as the tests."""
    with hosts(tmp_path_factory.mktemp("living"), "a", "b", "c") as made:
        yield made


def holders(made: Hosts, name: str, among: str = "") -> str:
    """The hosts that hold an object of the root."""
    found = ""
    for host in among or made.pids:
        objects = made.peer(host).ask("look", directory="")[0]["objects"]
        found += host if name in {told[0] for told in objects} else ""
    return found


def test_the_next_hosts_hold_copies(living: Hosts) -> None:
    for host, expected in (("a", "ab"), ("b", "bc"), ("c", "ac")):
        write(living.store(host), f"from-{host}", BLOB)
        assert holders(living, f"from-{host}") == expected
    write(living.store("b", copies=1), "alone", BLOB)
    assert holders(living, "alone") == "b"
    write(living.store("b", copies=9), "everywhere", BLOB)
    assert holders(living, "everywhere") == "abc"
    living.store("b", copies=1).publish("small", b"1", overwrite=False)
    assert holders(living, "small") == "abc"


def test_any_host_reads_from_any_other(living: Hosts) -> None:
    write(living.store("a"), "r-x", BLOB)
    for host in "abcd":
        store = living.store(host)
        assert store.read("r-x", 5, MIB) == BLOB[5:MIB]
        buffers = [bytearray(MIB) for _ in range(3)]
        requests = [ReadRequest(i * MIB, buffers[i]) for i in (2, 0, 1)]
        assert len(list(store.read_each("r-x", requests))) == 3
        assert b"".join(buffers) == BLOB
    assert living.status("d") is None, "who only reads starts no agent"


def test_one_host_dies(made: Hosts) -> None:
    write(made.store("a"), "x", BLOB)
    reader = made.store("a")
    assert reader.read("x") == BLOB
    made.kill("a")
    for store in (reader, made.store("a"), made.store("c"), made.store("d")):
        assert store.read("x") == BLOB
        assert names(store) == ["x"]


def test_a_host_dies_in_the_middle_of_a_read(made: Hosts) -> None:
    write(made.store("a"), "x", BLOB)
    buffers = [bytearray(MIB) for _ in range(3)]
    requests = [ReadRequest(i * MIB, buffer) for i, buffer in enumerate(buffers)]
    reading = made.store("c").read_each("x", requests)
    filled = [next(reading)]
    made.kill("a")
    filled += list(reading)
    assert sorted(map(id, filled)) == sorted(map(id, requests)), "each once"
    assert b"".join(buffers) == BLOB


def test_all_holders_die(made: Hosts) -> None:
    write(made.store("a"), "x", BLOB)
    reader = made.store("c")
    reader.stat("x")
    made.kill("a")
    made.kill("b")
    for store in (reader, made.store("d")):
        with pytest.raises(ObjectNotFound, match=r"do not answer: a \(127.*, b \(127"):
            store.read("x")
    made.kill("c")
    with pytest.raises(StorageError, match=r"no agent of the job .* answers: .*of a .*of b "):
        made.store("d").read("x")


def test_a_host_that_holds_its_copy_dies_while_it_is_written(made: Hosts) -> None:
    store = made.store("a")
    with store.create("x", len(BLOB)) as stream:
        stream.write(BLOB[:MIB])
        made.kill("b")
        stream.write(BLOB[MIB:])
    assert holders(made, "x") == "ac", "another one took its place"
    assert made.store("c").read("x") == BLOB


def test_the_last_other_host_dies(made: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    made.kill("c")
    store = made.store("a")
    with caplog.at_level(logging.WARNING), store.create("x", len(BLOB)) as stream:
        stream.write(BLOB[:MIB])
        made.kill("b")
        stream.write(BLOB[MIB:])
    assert "held by 1 hosts, not by 2" in caplog.text
    assert store.read("x") == BLOB
    store.publish("y", b"1", overwrite=False)


def test_the_agent_of_the_writer_dies(made: Hosts) -> None:
    store = made.store("a")
    stream = store.create("x", len(BLOB))
    stream.write(BLOB[:MIB])
    made.kill("a")
    stream.write(BLOB[MIB:])
    with pytest.raises(StorageError, match=r"agent of a .*does not answer"):
        stream.close()
    assert names(made.store("b")) == [], "half of a commit is taken back"
    write(store, "x", BLOB)
    status = made.status("a")
    assert status is not None
    made.pids["a"] = status.pid
    assert holders(made, "x") == "ba"


def test_a_silent_host_is_given_up(made: Hosts) -> None:
    write(made.store("a"), "x", BLOB)
    write(made.store("b"), "y", BLOB)
    store = made.store("a", timeout=0.5)
    os.kill(made.pids["b"], signal.SIGSTOP)
    try:
        assert store.read("y") == BLOB
        write(store, "z", BLOB)
        assert holders(made, "z", "ac") == "ac"
        other = made.store("d", timeout=0.5)
        assert other.read("x") == BLOB
    finally:
        os.kill(made.pids["b"], signal.SIGCONT)


def test_a_new_host_takes_part(made: Hosts) -> None:
    store = made.store("c")
    write(store, "x", BLOB)
    made.start("d")
    other = made.store("d")
    assert other.read("x") == BLOB
    write(other, "y", BLOB)
    assert holders(made, "y") == "ad"
    # Of what was published before it knows nothing, which counts for nothing.
    made.store("a").publish("z", b"1", overwrite=False)
    made.start("0")
    for host in "0ad":
        with pytest.raises(ObjectExists):
            made.store(host).publish("z", b"2", overwrite=False)
    newest = made.store("0")
    newest.replace("z", b"3", expected=b"1")
    assert {made.store(host).read("z") for host in "0abcd"} == {b"3"}
    newest.remove("z", expected=b"3")
    assert [made.store(host).exists("z") for host in "0abcd"] == [False] * 5


def test_who_missed_a_replacement_is_not_believed(made: Hosts) -> None:
    store = made.store("a", timeout=0.5)
    store.publish("x", b"old", overwrite=False)
    os.kill(made.pids["c"], signal.SIGSTOP)
    try:
        store.publish("x", b"new", overwrite=True)
    finally:
        os.kill(made.pids["c"], signal.SIGCONT)
    assert made.store("c").read("x") == b"new"
    assert made.store("d").read("x") == b"new"


def test_a_list_of_addresses_does_without_a_registry(living: Hosts) -> None:
    write(living.store("a"), "l-x", BLOB)
    addresses: list[str] = []
    for host in "abc":
        status = living.status(host)
        assert status is not None
        addresses += [f"{h}:{p}" for h, p in status.addresses]
    token = next(living.registry.glob("*.token")).read_text()
    store = PeersStore(
        f"peers://{living.job}", agents=addresses, token=token, host="d", registry=""
    )
    assert store.read("l-x") == BLOB
    own = PeersStore(f"peers://{living.job}", agents=addresses, token=token, host="c", registry="")
    write(own, "l-y", BLOB)
    assert holders(living, "l-y") == "ac"


def test_objects_cannot_be_changed_any_more(living: Hosts) -> None:
    write(living.store("a"), "o-x", BLOB)
    opened = open_object(living.peer("a"), "o-x")
    for flags in (os.O_RDWR, os.O_WRONLY):
        fd = os.open(f"/proc/self/fd/{opened.fd}", flags)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"1", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 1)
        finally:
            os.close(fd)
    living.store("a").delete(["o-x"])
    assert os.pread(opened.fd, 10, 0) == BLOB[:10], "who reads goes on reading"


def test_a_full_host_says_what_is_needed_and_free(tmp_path: Path) -> None:
    with hosts(tmp_path, "a", budget_bytes=4 * MIB) as made:
        store = made.store("a")
        write(store, "step-1/data/s/0", BLOB)
        store.publish("step-1/manifest.json", b"{}", overwrite=False)
        with pytest.raises(StorageError, match=r"3145728 bytes are needed, but 1048574 of 4194304"):
            store.create("step-2/data/s/0", len(BLOB))
        assert names(store) == ["step-1/data/s/0", "step-1/manifest.json"]
        write(store, "step-2/data/s/0", BLOB[: MIB // 2])
        store.publish("step-2/manifest.json", b"{}", overwrite=False)
        assert names(store) == ["step-2/data/s/0", "step-2/manifest.json"], "the older one went"


def test_threads_read_and_write_at_the_same_time(living: Hosts) -> None:
    failures: list[BaseException] = []
    before = sum(living.peer(host).ask("status")[0]["used_bytes"] for host in "abc")

    def work(number: int) -> None:
        try:
            store = living.store("abc"[number % 3])
            for turn in range(5):
                write(store, f"{number}/{turn}", BLOB[: MIB + number])
                for other in range(turn):
                    name = f"{number}/{other}"
                    assert store.read(name) == BLOB[: MIB + number]
                store.delete([f"{number}/{turn}"] if turn % 2 else [])
                if turn % 2:
                    write(store, f"{number}/{turn}", BLOB[: MIB + number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    listed = [name for name in names(living.store("a")) if "/" in name]
    assert len(listed) == 30
    living.store("a").delete(listed)
    used = [living.peer(host).ask("status")[0]["used_bytes"] for host in "abc"]
    assert sum(used) == before


def test_requests_that_make_no_sense_end_the_connection_alone(living: Hosts) -> None:
    write(living.store("a"), "q-x", BLOB)
    peer: Peer = living.peer("a")
    requests: list[tuple[str, dict[str, Any]]] = [
        ("nonesuch", {}),
        ("read", {"name": "q-x", "ranges": [(0, 1 << 40)]}),
        ("read", {"name": "q-x", "ranges": [(-5, 5)]}),
        ("commit", {"stamp": 1}),
        ("look", {}),
    ]
    for op, fields in requests:
        with pytest.raises(StorageError, match="does not answer"):
            peer.ask(op, **fields)
    with pytest.raises(StorageError, match="bytes are needed"):
        peer.ask("create", name="q-y", size=1 << 50)
    assert living.store("a").read("q-x") == BLOB
