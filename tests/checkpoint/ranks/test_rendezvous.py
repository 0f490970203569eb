"""How ranks find each other, and what strangers, silence and wrong addresses do to it."""

from __future__ import annotations

import gc
import logging
import resource
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt import addresses
from dtckpt.checkpoint.ranks import group_ranks, rendezvous
from dtckpt.checkpoint.ranks.boards import StoreBoard
from dtckpt.checkpoint.ranks.greeting import Invitation
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.errors import CheckpointError, RankFailed
from dtckpt.storage import MemoryStore

from ...waiting import beside_each_other
from .plain_groups import agree, run

_c10d: Any = dist
SECOND = timedelta(seconds=1)
MOST_SECONDS = 25.0


def state() -> dict[str, Any]:
    return {"t": torch.ones(10)}


def test_the_group_is_not_used_but_for_its_store() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        dcp.save(state(), store.substore("1"), process_group=group)
        dcp.load(state(), store.substore("1"), process_group=group)

    assert run(3, body) == {0: None, 1: None, 2: None}


def test_strangers_do_not_disturb_a_save() -> None:
    """They hold the port from the moment it is there, and say nothing, or something else."""
    store, held, stopped = MemoryStore(), list[socket.socket](), threading.Event()
    shared = _c10d.HashStore()

    def scan() -> None:
        board = StoreBoard(shared)
        while not stopped.wait(0.001):
            if word := board.read():
                for address in Invitation.from_bytes(word).addresses:
                    for said in (b"", b"SSH-2.0-scan\r\n", b"x"):
                        with suppress(OSError):  # once the group and its listener are gone
                            held.append(socket.create_connection(address))
                            held[-1].sendall(said)
            if len(held) > 100:
                return

    scanner = threading.Thread(target=scan, daemon=True)
    scanner.start()

    def body(rank: int, group: Any) -> None:
        for number in range(5):
            dcp.save(state(), store.substore(str(number)), process_group=group, timeout=30 * SECOND)

    assert run(2, body, shared) == {0: None, 1: None}
    stopped.set()
    scanner.join(20)
    assert held
    for connection in held:
        connection.close()


def test_the_first_call_of_a_job_keeps_its_timeout() -> None:
    """Beside a rank that does not come, whose process may be alive or not."""

    def check(silent: int) -> None:
        stopped = threading.Event()

        def body(rank: int, group: Any) -> float:
            if rank == silent:
                stopped.wait(60)
                return 0.0
            began = time.monotonic()
            try:
                with pytest.raises(RankFailed, match=f"rank {silent}"):
                    agree(group, SECOND)
            finally:
                if rank == max({0, 1, 2} - {silent}):
                    stopped.set()
            return time.monotonic() - began

        waited = run(3, body)
        assert all(seconds < MOST_SECONDS for seconds in waited.values()), waited

    beside_each_other(check, [(0,), (1,), (2,)])


class HangingStore:
    """A store whose host is stopped."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def hang(*_: object) -> None:
            self.opened.wait(60)

        return hang


def test_a_store_that_hangs_does_not() -> None:
    store = HangingStore()

    def body(rank: int, group: Any) -> str:
        with pytest.raises(RankFailed, match=r"does not answer: no answer within 1.0 s") as failure:
            agree(group, SECOND)
        return str(failure.value)

    began = time.monotonic()
    texts = run(2, body, store)
    store.opened.set()
    assert time.monotonic() - began < MOST_SECONDS
    assert "rank 1 could not meet the others of ranks 0-1" in texts[1]


def test_a_store_that_fails_is_named() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("Connection reset by peer\nException raised from sendBytes")

    for error in run(2, lambda _, group: agree(group), Broken()).values():
        assert isinstance(error, RankFailed)
        assert "does not answer: Connection reset by peer" in str(error)
        assert "sendBytes" not in str(error)


def posted(store: Any, **changes: Any) -> None:
    """Replace what the coordinator has said of itself."""
    board = StoreBoard(store)
    word = board.read()
    assert word is not None
    told = Invitation.from_bytes(word)
    value = {
        name: getattr(told, name)
        for name in ("addresses", "token", "welcome", "size", "generation")
    }
    board.post(Invitation(**value | changes).to_bytes())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_addresses_are_tried_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the first, somebody else at the second, nobody speaks at the third."""
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 1.0)
    store, met = _c10d.HashStore(), threading.Barrier(2)
    with (
        socket.create_server(("127.0.0.1", 0)) as wrong,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):

        def answer() -> None:
            connection, _ = wrong.accept()
            connection.sendall(b"220 smtp.example ESMTP")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()

        def body(rank: int, group: Any) -> bytes:
            if rank == 0:
                members_of(group)
                word = StoreBoard(store).read()
                assert word is not None
                right = Invitation.from_bytes(word).addresses
                before = (
                    ("127.0.0.1", free_port()),
                    wrong.getsockname(),
                    silent.getsockname(),
                )
                posted(store, addresses=(*before, *right))
            met.wait(20)
            return agree(group)

        assert run(2, body, store) == {0: b"xx", 1: b"xx"}


def test_a_coordinator_that_cannot_be_reached_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_WARN_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(group_ranks, "_GRACE_SECONDS", 0.1)
    store, met = _c10d.HashStore(), threading.Barrier(2)
    silent = socket.create_server(("127.0.0.1", 0))

    def body(rank: int, group: Any) -> str:
        if rank == 0:
            members_of(group)
            posted(store, addresses=(silent.getsockname(),))
        met.wait(20)
        with pytest.raises(RankFailed) as failure:
            agree(group, SECOND)
        return str(failure.value)

    with caplog.at_level(logging.WARNING, "dtckpt.checkpoint"):
        texts = run(2, body, store)
    port = silent.getsockname()[1]
    silent.close()
    assert "rank 1 is lost: it showed no sign of life within 1 s: it has not come" in texts[0]
    assert "rank 0, which coordinates ranks 0-1, is lost" in texts[1]
    assert f"127.0.0.1:{port}: timed out" in texts[1]
    assert f"127.0.0.1:{port}: timed out" in caplog.text, "long before it is given up"
    assert "set DTCKPT_HOST on rank 0" in texts[1]


def test_a_coordinator_that_is_gone_is_missed_at_once() -> None:
    """Its address is refused: nobody listens there any more."""
    store, gone = _c10d.HashStore(), threading.Event()

    def body(rank: int, group: Any) -> None:
        if rank == 0:
            members_of(group)
            posted(store, addresses=(("127.0.0.1", free_port()),))
            gone.set()
            return
        gone.wait(20)
        with pytest.raises(RankFailed, match="its process ended"):
            agree(group, timedelta(minutes=10))

    began = time.monotonic()
    assert run(2, body, store) == {0: None, 1: None}
    assert time.monotonic() - began < MOST_SECONDS


def test_word_of_an_earlier_job_is_not_believed() -> None:
    """Ranks that were restarted meet in the same store, and some come before the coordinator."""
    store = _c10d.HashStore()
    assert run(2, lambda _, group: agree(group), store) == {0: b"xx", 1: b"xx"}
    posted(store, addresses=(("127.0.0.1", free_port()),))
    tried = threading.Event()

    def body(rank: int, group: Any) -> bytes:
        if rank == 0:
            tried.wait(20)
        else:
            threading.Timer(0.3, tried.set).start()
        return agree(group)

    assert run(2, body, store) == {0: b"xx", 1: b"xx"}


def test_a_coordinator_that_cannot_listen_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(addresses.PORT_VARIABLE, "99999")
    for error in run(3, lambda _, group: agree(group)).values():
        assert isinstance(error, CheckpointError)
        assert "rank 0, which coordinates ranks 0-2, cannot listen" in str(error)
        assert "DTCKPT_PORT" in str(error)


@pytest.mark.parametrize("text", ["x", "5-3", "-1", "1-70000", "29600:29601", "1 2"])
def test_a_wrong_port_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(addresses.PORT_VARIABLE, text)
    with pytest.raises(CheckpointError, match="DTCKPT_PORT is a port or a range"):
        addresses.listen(2)


def test_ports_are_taken_from_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(p for p in range(20000, 60000, 7) if _is_free(p) and _is_free(p + 1))
    monkeypatch.setenv(addresses.PORT_VARIABLE, f"{first}-{first + 1}")
    monkeypatch.setenv(addresses.HOST_VARIABLE, "127.0.0.1")
    found = [addresses.listen(2)[1][0] for _ in range(2)]
    assert [made.getsockname() for made in found] == [
        ("127.0.0.1", first),
        ("127.0.0.1", first + 1),
    ]
    with pytest.raises(OSError, match=r"no port of .* is free at 127.0.0.1; each process group"):
        addresses.listen(2)
    for made in found:
        made.close()


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def hosts_for(monkeypatch: pytest.MonkeyPatch, **environment: str) -> tuple[list[str], list[str]]:
    """Return what others are told and where it is listened, in some environment."""
    for name in ("MASTER_ADDR", addresses.HOST_VARIABLE, addresses.PORT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hosts, sockets = addresses.listen(2)
    bound = [made.getsockname()[0] for made in sockets]
    for made in sockets:
        made.close()
    return hosts, bound


def test_only_the_address_that_others_are_told_is_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hosts_for(monkeypatch, MASTER_ADDR="localhost")[1] in (["127.0.0.1"], ["::1"])
    assert hosts_for(monkeypatch, MASTER_ADDR="127.0.0.1") == (["127.0.0.1"], ["127.0.0.1"])
    assert hosts_for(monkeypatch, DTCKPT_HOST="127.0.0.3") == (["127.0.0.3"], ["127.0.0.3"])
    hosts, bound = hosts_for(monkeypatch)
    assert hosts == bound
    assert not {"", "0.0.0.0", "::"} & set(bound)


def test_an_address_of_a_router_is_told_and_all_are_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts, bound = hosts_for(monkeypatch, DTCKPT_HOST="192.0.2.77")
    assert hosts == ["192.0.2.77"]
    assert bound[0] in ("::", "0.0.0.0")


def test_the_name_of_this_host_may_stand_for_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Debian, where others would find themselves at 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "this.example")
    resolve = socket.getaddrinfo

    def named(host: str | None, *args: Any, **options: Any) -> Any:
        return resolve("127.0.1.1" if host == "this.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", named)
    monkeypatch.setattr(addresses, "_ANYWHERE", ("127.0.0.9",))
    assert hosts_for(monkeypatch, MASTER_ADDR="this.example")[0] == ["127.0.0.1"]


def test_too_few_descriptors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []

    def limits(_: int) -> tuple[int, int]:
        return 64, 512

    def set_limits(_: int, given: tuple[int, int]) -> None:
        raised.append(given)

    monkeypatch.setattr(resource, "getrlimit", limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    with pytest.raises(OSError, match=r"10000 ranks need .* may open 512 files"):
        addresses.listen(10000)
    _, sockets = addresses.listen(100)
    assert raised == [(512, 512), (512, 512)]
    for made in sockets:
        made.close()


def test_what_is_kept_for_a_group_goes_with_it() -> None:
    known: Any = vars(rendezvous)["_known"]
    before = len(known)
    run(2, lambda _, group: agree(group))
    gc.collect()
    assert len(known) <= before


def test_groups_of_other_sizes_follow_one_another_under_one_name() -> None:
    """As when a job in one process goes on with more or fewer ranks; old word is not believed."""
    store = _c10d.HashStore()
    kept: list[Any] = []

    def body(rank: int, group: Any) -> bytes:
        if rank % 2:
            kept.append(group)  # some groups still listen when the next one meets
        if rank == 0:
            time.sleep(0.05)  # the others find what the group before has left
        return agree(group, timedelta(seconds=20))

    for size in (2, 3, 3, 2, 4, 4):
        assert run(size, body, store) == dict.fromkeys(range(size), b"x" * size)
