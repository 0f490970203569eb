"""Where the coordinator leaves word, and how a member finds it by that, without other ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtckpt import addresses
from dtckpt.checkpoint.ranks import rendezvous
from dtckpt.checkpoint.ranks.boards import GatherBoard, device_of
from dtckpt.checkpoint.ranks.greeting import Invitation, Listener
from dtckpt.checkpoint.ranks.rendezvous import Route, members_of
from dtckpt.checkpoint.ranks.wire import Wire
from dtckpt.errors import CheckpointError, RankFailed

from ...waiting import Clock, wait_for
from .plain_groups import Group

_c10d: Any = dist


class Board:
    """Word that the test leaves."""

    def __init__(self, word: Invitation | Exception | None = None) -> None:
        self.word = word
        self.reads = 0

    def introduce(self, rank: int, size: int) -> int:
        return 1

    def post(self, word: bytes) -> None:
        raise NotImplementedError

    def read(self) -> bytes | None:
        self.reads += 1
        assert self.reads < 1000
        if isinstance(self.word, Exception):
            raise self.word
        return self.word and self.word.to_bytes()


def route(board: Board, generation: int = 1) -> Route:
    """How rank 1 of two reaches rank 0."""
    return Route(board, 1, (0, 1), generation)


def refused(host: str = "127.0.0.1", generation: int = 1) -> Invitation:
    """Word of an address at which nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return Invitation(addresses=((host, port),), size=2, generation=generation)


def is_refused(invitation: Invitation) -> bool:
    """Whether nobody listens there any more."""
    try:
        socket.create_connection(invitation.addresses[0]).close()
    except OSError:
        return True
    return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rendezvous, "time", made)
    return made


@pytest.fixture
def coordinators() -> Iterator[list[tuple[Wire, Invitation]]]:
    """Two that listen."""
    made: list[tuple[Wire, Invitation]] = []
    for _ in range(2):
        listener = Listener([socket.create_server(("127.0.0.1", 0))], 2)
        made.append((Wire([1], listener), listener.invitation(["127.0.0.1"], 1)))
    yield made
    for wire, _ in made:
        wire.close()


@pytest.mark.parametrize(
    ("purpose", "text"),
    [
        ("load", "load: rank 0, which coordinates ranks 0-1, did not begin a load: it showed no "),
        ("", "rank 0, which coordinates ranks 0-1, did not begin a call: it showed no "),
    ],
)
def test_a_coordinator_that_has_left_no_word_has_made_no_call(
    clock: Clock, purpose: str, text: str
) -> None:
    board = Board()
    with pytest.raises(RankFailed) as failure:
        route(board).connect(0, purpose, 10.0)
    assert str(failure.value).startswith(f"{text}sign of life within 10 s, and has made no save")
    assert clock.now == 1010.0
    assert 40 < board.reads < 60, "the store is asked four times a second"


def test_a_store_that_fails_later_is_named() -> None:
    board = Board(ConnectionError())
    with pytest.raises(RankFailed, match=r"save: .* the process group does not answer: Connection"):
        route(board).connect(0, "save", 20.0)


def test_where_nobody_listens_any_more_the_coordinator_is_missed_at_once(clock: Clock) -> None:
    with pytest.raises(RankFailed, match=r"its process ended \(127.0.0.1:\d+: .*refused"):
        route(Board(refused())).connect(0, "save", 10.0)
    assert clock.now == 1000.0
    with pytest.raises(RankFailed, match=r"no sign of life within 10 s, 127.0.0.1:\d+: .*refused"):
        route(Board(refused()), generation=2).connect(0, "save", 10.0)
    assert clock.now == 1010.0


def test_addresses_are_told_as_one_writes_them(clock: Clock) -> None:
    board = Board(refused("::1"))
    with pytest.raises(RankFailed, match=r" \[::1\]:\d+: "):
        route(board, generation=2).connect(0, "save", 1.0)


def test_an_attempt_that_had_no_time_does_not_hide_why_the_others_failed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*args: Any) -> None:
        raise ConnectionError("told why") if args[-1] > 0.01 else TimeoutError("timed out")

    monkeypatch.setattr(rendezvous, "probe", probe)
    with pytest.raises(RankFailed, match="told why"):
        route(Board(refused())).connect(0, "save", 3.0)


def test_what_keeps_a_member_waiting_is_told_once_after_a_while(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(board: Board, seconds: float) -> list[str]:
        caplog.clear()
        with pytest.raises(RankFailed):
            route(board, generation=2).connect(0, "save", seconds)
        return caplog.messages

    with caplog.at_level(logging.WARNING, "dtckpt.checkpoint"):
        assert warnings(Board(), 10.0) == [], "it may just be slow"
        assert warnings(Board(refused()), 4.0) == []
        (text,) = warnings(Board(refused()), 10.0)
    assert "tried for 10 s: 127.0.0.1:" in text


def test_who_moved_is_found_again(coordinators: list[tuple[Wire, Invitation]]) -> None:
    """As where the group was made anew; and the store is asked only then."""
    (one, first), (_, second) = coordinators
    board = Board(first)
    member = route(board)
    for call in range(2):
        member.connect(call, "save", 20.0).close()
    assert board.reads == 1
    board.word = second
    one.close()
    wait_for(lambda: is_refused(first))
    link = member.connect(2, "save", 20.0)
    assert link.connection.getpeername() == second.addresses[0]
    assert link.rank == 0
    link.close()
    assert board.reads == 2


def test_one_that_did_not_answer_in_time_is_looked_for_anew(
    coordinators: list[tuple[Wire, Invitation]],
) -> None:
    (_, first), (_, second) = coordinators
    board = Board(first)
    member = route(board)
    member.connect(0, "save", 20.0).close()
    board.word = second
    member.forget()
    link = member.connect(1, "save", 20.0)
    assert link.connection.getpeername() == second.addresses[0]
    link.close()


def test_without_time_left_what_was_tried_last_is_told(
    clock: Clock, coordinators: list[tuple[Wire, Invitation]]
) -> None:
    (wire, first), _ = coordinators
    member = route(Board(first))
    member.connect(0, "save", 20.0).close()
    wire.close()
    wait_for(lambda: is_refused(first))
    with pytest.raises(RankFailed, match=r"no sign of life within 0 s, 127.0.0.1:\d+: "):
        member.connect(1, "save", 0.0)


class FailingStore:
    """A store that counts, and takes no word."""

    def add(self, key: str, number: int) -> int:
        return number

    def set(self, key: str, value: bytes) -> None:
        raise ConnectionError("Connection reset by peer")


def test_a_coordinator_that_can_leave_no_word_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []

    def listen(num_ranks: int) -> tuple[list[str], list[socket.socket]]:
        made.append(socket.create_server(("127.0.0.1", 0)))
        return ["127.0.0.1"], made[-1:]

    group = Group(FailingStore(), 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "listen", listen)
        with pytest.raises(RankFailed, match=r"rank 0 could not meet .* answer: Connection reset"):
            members_of(group)
    assert [listening.fileno() for listening in made] == [-1]
    monkeypatch.setenv(addresses.PORT_VARIABLE, "99999")
    with pytest.raises(CheckpointError, match="rank 0, which coordinates ranks 0-1, cannot listen"):
        members_of(group)


class Work:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        raise ConnectionError("Connection closed by peer")


class GatheringGroup:
    """A group whose collectives do nothing."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def size(self) -> int:
        return 2

    def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        assert received.numel() == 2 * sent.numel()
        self.works.append(Work())
        return self.works[-1]


def test_a_board_of_one_collective_takes_part_in_one() -> None:
    group = GatheringGroup()
    board = GatherBoard(group)
    assert board.read() is None
    assert board.read() is None
    (work,) = group.works
    work.is_over = True
    with pytest.raises(ConnectionError, match="closed by peer"):
        board.read()


def test_word_for_a_collective_has_a_size() -> None:
    group = GatheringGroup()
    board = GatherBoard(group)
    with pytest.raises(CheckpointError, match="the addresses of this host take 2049 bytes"):
        board.post(bytes(2049))
    assert group.works == []
    board.post(bytes(2048))
    assert len(group.works) == 1


def test_a_board_does_not_keep_its_group() -> None:
    group = GatheringGroup()
    board = GatherBoard(group)
    del group
    with pytest.raises(CheckpointError, match="the process group is gone"):
        board.read()


@pytest.mark.parametrize(
    ("backends", "accelerator", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "cpu"),
        ("cpu:gloo", None, "cpu"),
        ("cuda:nccl", "cuda", "cuda:3"),
        ("cuda:gloo", "cuda", "cuda:3"),
        ("cuda:nccl", None, "cpu"),
    ],
)
def test_bytes_are_moved_where_the_group_can(
    monkeypatch: pytest.MonkeyPatch, backends: str, accelerator: str | None, device: str
) -> None:
    current = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert device_of(_c10d.ProcessGroup(0, 1)) == torch.device(device)
    assert device_of(object()) == torch.device("cpu"), "a group that torch does not know"
