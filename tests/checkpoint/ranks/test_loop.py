"""The thread that serves connections: what goes wrong in it, and when it ends."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks.boards import StoreBoard
from dtckpt.checkpoint.ranks.call import Signs
from dtckpt.checkpoint.ranks.greeting import Greeting, Hello, Invitation, Listener, probe
from dtckpt.checkpoint.ranks.link import Link
from dtckpt.checkpoint.ranks.loop import Loop
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.ranks.together import ranks_of
from dtckpt.checkpoint.ranks.wire import Wire
from dtckpt.errors import RankFailed
from dtckpt.storage import MemoryStore

from ...waiting import wait_for
from .plain_groups import agree, run

QUIET = Signs(3600.0, lambda: None)
HOURS = timedelta(hours=1)


def fail(*_: object) -> Any:
    raise LookupError("a mistake of ours")


def test_an_unexpected_error_of_one_connection_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, group: Any) -> bytes:
        if rank == 0:
            members_of(group)
            word = StoreBoard(group.get_group_store()).read()
            assert word is not None
            invitation = Invitation.from_bytes(word)
            with monkeypatch.context() as patch:
                patch.setattr(Greeting, "read", fail)
                with pytest.raises(OSError, match=r"closed|reset"):
                    probe(invitation.addresses[0], invitation, 1, 1, 20.0)
            met.wait(20)
        else:
            met.wait(20)
        return agree(group)

    met = threading.Barrier(2)
    assert run(2, body) == {0: b"xx", 1: b"xx"}


def test_so_is_one_while_somebody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener([socket.create_server(("127.0.0.1", 0))])
    invitation, tried = listener.invitation(["127.0.0.1"], 1), threading.Event()
    accept = Listener.accept

    def fail_once(*args: Any) -> Any:
        if tried.is_set():
            return accept(*args)
        tried.set()
        return fail()

    monkeypatch.setattr(Listener, "accept", fail_once)
    wire = Wire([1], listener)
    probe(invitation.addresses[0], invitation, 1, 0, 20.0)
    assert tried.is_set()
    wire.close()


def test_all_calls_are_told_when_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire([1, 2])
    one, other = socket.socketpair()
    wire.begin_call(0, "save", QUIET)
    wire.meet(Hello(rank=1, purpose="save"), one)
    monkeypatch.setattr(Loop, "_expire_ending", fail)
    vars(wire)["_loop"].wake()
    _, lost = wire.collect(0, 0, [1, 2], 3600.0)
    assert lost.keys() == {1, 2}
    for reason in lost.values():
        assert "thread that serves the connections of this rank has ended: LookupError" in reason
    wire.begin_call(1, "save", QUIET)
    assert wire.collect(1, 0, [1, 2], 3600.0)[1] == lost
    other.close()


def test_a_call_whose_connections_are_closed_ends() -> None:
    def body(rank: int, group: Any) -> None:
        if rank == 0:
            threading.Timer(0.2, members_of(group).wire.close).start()
            with pytest.raises(RankFailed, match="the connections of this rank were closed"):
                agree(group, HOURS)

    assert run(2, body) == {0: None, 1: None}


def test_a_wire_that_is_let_go_of_in_its_thread_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hold(_: Wire) -> None:
        reached.set()
        opened.wait(20)

    monkeypatch.setattr(Wire, "beat", hold)
    wire = Wire()
    loop: Any = vars(wire)["_loop"]
    loop.wake()
    assert reached.wait(20)
    del wire  # the thread holds the last reference
    opened.set()
    wait_for(lambda: loop._wake.fileno() < 0)


def test_nothing_of_a_call_is_kept_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[weakref.ref[Link]] = []
    close = Link.close

    def note(link: Link) -> None:
        ended.append(weakref.ref(link))
        close(link)

    monkeypatch.setattr(Link, "close", note)
    groups: list[Any] = []

    def body(_: int, group: Any) -> bytes:
        groups.append(group)
        return agree(group)

    gc.disable()
    try:
        assert run(2, body) == {0: b"xx", 1: b"xx"}
        wait_for(lambda: len(ended) >= 2 and not any(link() for link in ended))
    finally:
        gc.enable()


def test_a_group_takes_its_wire_with_it_without_the_collector() -> None:
    store = MemoryStore()
    gc.collect()
    gc.disable()
    try:

        def body(rank: int, group: Any) -> weakref.ref[Wire]:
            dcp.async_save({"x": torch.ones(3)}, store, process_group=group).result(60)
            return weakref.ref(members_of(group).wire)

        found = run(2, body)
        wait_for(lambda: [ref() for ref in found.values()] == [None, None])
    finally:
        gc.enable()


def test_a_call_that_is_let_go_of_is_left() -> None:
    """As when it was interrupted before it could be closed; the others do not wait for it."""

    groups: list[Any] = []

    def body(rank: int, group: Any) -> None:
        if rank == 1:
            groups.append(group)  # which goes on
            ranks_of(group, timeout=HOURS, purpose="save")
            return
        with pytest.raises(RankFailed, match="rank 1 is lost: it has given up"):
            agree(group, HOURS)

    assert run(2, body) == {0: None, 1: None}
