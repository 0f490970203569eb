"""How the ranks of a process group find each other, at every save and load anew.

The coordinator listens for as long as the group lives, and leaves word of where in the store of the
group, through which the ranks of the group once met. The collectives of the group stay with the
training: one that a rank gave up waiting for would break the group.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from dtckpt.addresses import HOST_VARIABLE, listen
from dtckpt.errors import CheckpointError, RankFailed
from dtckpt.logs import logger_of

from .boards import Board, board_of
from .call import CallNumbers
from .greeting import Hello, Invitation, Listener, probe, say_hello
from .link import Link
from .relay import Relay, children_of
from .text import ranks_text
from .wire import Wire

logger = logger_of("checkpoint")

_CONNECT_SECONDS = 5.0
"""How long one address may take to answer before the next is tried."""
_WARN_SECONDS = 5.0
"""After so long a member says why it has not reached the coordinator."""


class Route:
    """How this member reaches the coordinator."""

    def __init__(self, board: Board, rank: int, everyone: tuple[int, ...], generation: int) -> None:
        self._board = board
        self._generation = generation
        self._rank = rank
        self._first = everyone[0]
        self._everyone = everyone
        self._instance = secrets.randbits(64)
        self._known: tuple[Invitation, tuple[str, int]] | None = None
        """What has worked before."""

    def connect(self, call: int, purpose: str, seconds: float, target: int = 0) -> Link:
        """Connect to the coordinator for one call; it need not have come to it.

        ``target`` is what the call is made for, by `call.target_number`.

        Raises RankFailed, naming the coordinator and what was tried.
        """
        limit = time.monotonic() + seconds
        hello = Hello(
            rank=self._rank, instance=self._instance, purpose=purpose, call=call, target=target
        )
        while True:
            if self._known is None:
                self._known = self._find(hello, seconds, limit)
            invitation, address = self._known
            try:
                left = min(_CONNECT_SECONDS, limit - time.monotonic())
                connection = say_hello(address, invitation, hello, left)
            except OSError as error:
                self._known = None
                if time.monotonic() < limit:
                    continue
                what = self._not_found(hello, seconds, _tried(address, error))
                raise RankFailed(what) from error
            # The welcome need not be waited for: who is there has been found out before.
            return Link(self._first, connection, welcome=bytes.fromhex(invitation.welcome))

    def forget(self) -> None:
        """Ask anew where the coordinator is when the next call begins."""
        self._known = None

    def _find(
        self, hello: Hello, seconds: float, limit: float
    ) -> tuple[Invitation, tuple[str, int]]:
        """Read where the coordinator listens until one of its addresses can be reached."""
        problem, pause, is_told = "", 0.002, False
        while True:
            invitation = self._invitation(hello, limit - time.monotonic())
            refusals = 0
            for address in invitation.addresses if invitation else ():
                left = min(_CONNECT_SECONDS, limit - time.monotonic())
                try:
                    told = cast(Invitation, invitation)
                    probe(address, told, self._rank, self._instance, left)
                except OSError as error:
                    is_short = isinstance(error, TimeoutError) and left < _CONNECT_SECONDS
                    if not (problem and is_short):  # which only says that the time is up
                        problem = _tried(address, error)
                    refusals += isinstance(error, ConnectionRefusedError)
                else:
                    return cast(Invitation, invitation), address
            if invitation and refusals == len(invitation.addresses) and self._is_new(invitation):
                raise RankFailed(self._lost(hello, f"its process ended ({problem})"))
            now = time.monotonic()
            if now >= limit:
                raise RankFailed(self._not_found(hello, seconds, problem))
            if problem and not is_told and now > limit - seconds + _WARN_SECONDS:
                is_told = True
                logger.warning("%s", self._lost(hello, f"tried for {seconds:g} s: {problem}"))
            time.sleep(min(pause, limit - now))
            pause = min(2 * pause, 0.25)

    def _is_new(self, invitation: Invitation) -> bool:
        """Whether word is of this group, not of one before it that had the same name."""
        return invitation.generation >= self._generation

    def _invitation(self, hello: Hello, seconds: float) -> Invitation | None:
        try:
            word: bytes | None = _within(self._board.read, seconds)
        except Exception as error:
            what = f"the process group does not answer: {_short(error)}"
            raise RankFailed(self._lost(hello, what)) from error
        if not word:
            return None
        invitation = Invitation.from_bytes(word)
        if invitation.size != len(self._everyone):
            return None  # of a group before it that had the same name
        if invitation.problem:
            raise CheckpointError(invitation.problem)
        return invitation

    def _not_found(self, hello: Hello, seconds: float, problem: str) -> str:
        silent = f"it showed no sign of life within {seconds:g} s"
        if problem:
            return self._lost(hello, f"{silent}, {problem}")
        return (
            f"{self._coordinator(hello)}, did not begin a {hello.purpose or 'call'}: {silent}, and "
            "has made no save or load over this group yet. All ranks make the same calls in the "
            "same order"
        )

    def _coordinator(self, hello: Hello) -> str:
        at = f"{hello.purpose}: " if hello.purpose else ""
        return f"{at}rank {self._first}, which coordinates {ranks_text(self._everyone)}"

    def _lost(self, hello: Hello, why: str) -> str:
        return (
            f"{self._coordinator(hello)}, is lost: {why}. If it is alive, set {HOST_VARIABLE} on "
            f"rank {self._first} to an address at which rank {self._rank} reaches it"
        )


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a group and how they talk."""

    rank: int
    all: tuple[int, ...]
    """Global numbers, that of the coordinator first."""
    wire: Wire
    route: Route
    relay: Relay | None = None
    """What a member hands on, if it does so to anybody."""
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    """What saves and loads keep for the next one over the same group."""


@dataclass(slots=True)
class _Kept:
    """What this rank keeps of a group from its first call on."""

    numbers: CallNumbers = field(default_factory=CallNumbers)
    introducing: threading.Lock = field(default_factory=threading.Lock)
    members: Members | None = None


_known: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _kept_of(group: Any) -> _Kept:
    with _lock:
        return _known.setdefault(group, _Kept())


def numbers_of(group: Any) -> CallNumbers:
    """Return what numbers this rank's calls over a group."""
    return _kept_of(group).numbers


def members_of(group: Any, seconds: float = 60.0) -> Members:
    """Return the members of a group; on the coordinator the first call says where it listens.

    Raises CheckpointError there, and wherever a member comes to know of it, if it cannot listen.
    """
    kept = _kept_of(group)
    if kept.members is None:
        with kept.introducing:
            kept.members = kept.members or _introduced(group, kept.numbers, seconds)
    return kept.members


def _introduced(group: Any, numbers: CallNumbers, seconds: float) -> Members:
    everyone = _global_ranks(group)
    rank = everyone[group.rank()]
    board = board_of(group)

    def told(error: Exception) -> RankFailed:
        return RankFailed(
            f"rank {rank} could not meet the others of {ranks_text(everyone)}: the process group "
            f"does not answer: {_short(error)}"
        )

    try:
        generation: int = _within(lambda: board.introduce(rank, len(everyone)), seconds)
    except Exception as error:
        raise told(error) from error
    route = Route(board, rank, everyone, generation)
    if rank != everyone[0]:
        hands_on = children_of(group.rank(), len(everyone))
        relay = Relay() if hands_on else None
        return Members(rank, everyone, Wire(numbers=numbers), route, relay)
    listener: Listener | None = None
    problem: CheckpointError | None = None
    try:
        hosts, sockets = listen(len(everyone))
    except (OSError, CheckpointError) as error:
        problem = CheckpointError(
            f"rank {rank}, which coordinates {ranks_text(everyone)}, cannot listen for the others: "
            f"{error}"
        )
        invitation = Invitation(problem=str(problem), size=len(everyone), generation=generation)
    else:
        listener = Listener(sockets, len(everyone))
        invitation = listener.invitation(hosts, generation)
    try:
        _within(lambda: board.post(invitation.to_bytes()), seconds)
    except Exception as error:
        problem = problem or told(error)
    if problem is not None:
        if listener is not None:
            listener.close()
        raise problem
    return Members(rank, everyone, Wire(everyone[1:], listener, numbers), route)


def _within(call: Callable[[], Any], seconds: float) -> Any:
    """Return what a call does, which may hang; TimeoutError if it takes too long."""
    done: list[Any] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=run, name="dtckpt-store", daemon=True).start()
    if not ended.wait(max(seconds, 0.0) + 0.1):
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    if failed:
        raise failed[0]
    return done[0]


def _tried(address: tuple[str, int], error: OSError) -> str:
    host, port = address
    return f"{f'[{host}]' if ':' in host else host}:{port}: {error}"


def _short(error: BaseException) -> str:
    """Return the fact that torch reports, without the trace and the advice that it appends."""
    text = str(error).partition(" This is typically")[0].partition("\n")[0]
    return text or type(error).__name__


def _global_ranks(group: Any) -> tuple[int, ...]:
    if isinstance(group, torch.distributed.ProcessGroup):
        return tuple(torch.distributed.get_process_group_ranks(group))
    return tuple(range(group.size()))
