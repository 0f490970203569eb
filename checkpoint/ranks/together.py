"""The ranks that take part in a save or load, and the rule that they fail together.

``together`` runs one phase on every rank: each gives an answer, the coordinator decides, and all
get the decision, or all raise the same error. A rank that dies, falls silent or does not get on is
named in the error of the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch

from dtckpt.errors import CheckpointError, RankFailed

from .failing import CALLED_OFF, FAILED, OK, as_text, failure, joint_error, told
from .frames import check_size
from .group_ranks import DEFAULT_TIMEOUT, Answers, GroupRanks
from .rendezvous import calls_of, members_of

Decide = Callable[[Answers], bytes]

_NAMES_SECONDS = 10.0
"""How long ranks wait for each other to say what a failed phase has overwritten."""

_alone: dict[int, dict[str, Any]] = {}
"""What ranks without a group keep, by their number."""


class Ranks(Protocol):
    """Some ranks, of which this process (or thread) is one, during one save or load."""

    @property
    def rank(self) -> int:
        """Global number of this rank."""
        ...

    @property
    def all(self) -> tuple[int, ...]:
        """Global numbers of all ranks that take part; the first one coordinates."""
        ...

    @property
    def memory(self) -> dict[str, Any]:
        """What these ranks keep from one save or load to the next."""
        ...

    def begin(self, phase: str) -> None:
        """Note which part of the work this rank is at from here on; others are told of it.

        Raises CheckpointError if the call was made with wrong arguments, so that all learn of it.
        """
        ...

    def consult(
        self,
        answer: bytes,
        decide: Callable[[Answers, Mapping[int, str]], bytes],
        *,
        fatal: Callable[[bytes], bool],
        without: frozenset[int] = frozenset(),
        within: float | None = None,
    ) -> bytes:
        """Give an answer and return what the coordinator decides on all of them.

        ``decide`` runs on the coordinator, with the answers and with the ranks that are lost and
        why. Once an answer is ``fatal`` the others are not waited for any longer. Ranks
        ``without`` take no part. ``within`` seconds a rank is lost, by default the timeout. Raises
        RankFailed where the coordinator itself is lost.
        """
        ...

    def tell_alive(self) -> None:
        """Note that a long phase is getting on; cheap enough to call often."""
        ...

    def stalled_seconds(self) -> float:
        """How long this rank's own work has not got on; 0 while it waits for others."""
        ...

    def is_called_off(self) -> bool:
        """Whether some rank has failed in this phase while this rank is still at it."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End the save or load; others who are still at it learn that this rank is not."""
        ...


class Solo:
    """A single rank without a process group."""

    def __init__(self, rank: int = 0, wrong: str = "") -> None:
        self.rank = rank
        self.all = (rank,)
        self.memory = _alone.setdefault(rank, {})
        self._wrong = wrong
        self._progress_at = time.monotonic()

    def begin(self, phase: str) -> None:
        """Raise if the arguments are wrong."""
        self.tell_alive()
        if self._wrong:
            raise CheckpointError(self._wrong)

    def consult(
        self,
        answer: bytes,
        decide: Callable[[Answers, Mapping[int, str]], bytes],
        *,
        fatal: Callable[[bytes], bool],
        without: frozenset[int] = frozenset(),
        within: float | None = None,
    ) -> bytes:
        """Decide on the one answer there is."""
        self.tell_alive()
        return decide({self.rank: answer}, {})

    def tell_alive(self) -> None:
        """Note the time; nobody else waits."""
        self._progress_at = time.monotonic()

    def stalled_seconds(self) -> float:
        """How long the work has not got on."""
        return time.monotonic() - self._progress_at

    def is_called_off(self) -> bool:
        """Return False: there is nobody else to do so."""
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing."""


def ranks_of(
    process_group: Any = None,
    *,
    no_dist: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
    purpose: str = "",
    wrong: str = "",
) -> Ranks:
    """Return the ranks of a group, of the default group if there is one, or this one alone.

    All ranks of the group call this in the same order and for the same ``purpose``. ``wrong`` says
    what is wrong with the arguments of this rank's call: the first phase fails with it, on all
    ranks; so it does for a ``timeout`` or a group that is none.
    """
    wrong = wrong or _wrong_timeout(timeout)
    if wrong:
        timeout = DEFAULT_TIMEOUT
    distributed = torch.distributed
    is_initialized = distributed.is_available() and distributed.is_initialized()
    if no_dist:
        # Alone, but still itself: what a rank keeps for itself is found under its number.
        return Solo(distributed.get_rank() if is_initialized else 0, wrong)
    if process_group is not None and not hasattr(process_group, "rank"):
        if process_group == distributed.GroupMember.NON_GROUP_MEMBER:
            raise CheckpointError(
                "this rank is not a member of the process group that it was given; only the "
                "members of a group may call save and load with it"
            )
        wrong = wrong or f"process_group is no process group: {process_group!r}"
        process_group = None  # the likeliest one that the others wait on
    if process_group is None:
        if not is_initialized:
            return Solo(0, wrong)
        process_group = distributed.group.WORLD
    call = calls_of(process_group).enter()
    members = members_of(process_group, timeout.total_seconds())
    return GroupRanks(members, call, timeout, purpose, wrong)


@contextmanager
def closing(ranks: Ranks) -> Generator[None]:
    """Close the ranks at the end of the block, and tell the others what it raised, if anything.

    Not what is being handled around it: a job that fails may save once more.
    """
    try:
        yield
    except BaseException as error:
        ranks.close(error)
        raise
    ranks.close()


def _wrong_timeout(timeout: object) -> str:
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return ""
    return f"timeout is a datetime.timedelta above zero, got {timeout!r}"


def nothing(_: Answers) -> bytes:
    """Decide nothing: all that counts is that every rank is done."""
    return b""


def together(
    ranks: Ranks,
    phase: str,
    body: Callable[[], bytes],
    decide: Decide = nothing,
    *,
    on_failure: Callable[[CheckpointError], None] | None = None,
    touched: Callable[[], Iterable[str]] | None = None,
) -> bytes:
    """Run ``body`` on every rank and return the decision, or raise the same error on all ranks.

    ``decide`` runs on the coordinator with the answers of all ranks, in their order, and its
    result is what every rank gets. ``phase`` is what messages call this part of the work, for
    instance "save: write". The error is of the type that the failing rank raised if that is one of
    ours, RankFailed if a rank is lost, else CheckpointError. An exception that is not an
    ``Exception`` (Ctrl-C) is told to the others and raised as it is.

    ``on_failure`` is called with the error once it is certain that the coordinator has decided so;
    not where the coordinator was lost, since it may have decided otherwise. ``touched`` names what
    this rank has overwritten, whether it failed or not; it is asked, on every rank, only after a
    failure.
    """
    own: BaseException | None = None
    own_decision: BaseException | None = None
    try:
        ranks.begin(phase)
        answer = OK + body()
        check_size(answer)
    except BaseException as error:
        own, answer = error, FAILED + told(error)

    def conclude(answers: Answers, lost: Mapping[int, str]) -> bytes:
        nonlocal own_decision
        failed = {rank: given[1:] for rank, given in answers.items() if given[:1] != OK}
        if failed or lost:
            causes = {rank: cause for rank, cause in failed.items() if cause != CALLED_OFF}
            return failure(causes if causes or lost else failed, lost, is_certain=True)
        try:
            decision = OK + decide({rank: given[1:] for rank, given in answers.items()})
            check_size(decision)
        except BaseException as error:
            own_decision = error
            return failure({ranks.all[0]: told(error)}, {})
        return decision

    waits_for_all = touched is not None  # names what was overwritten on every rank

    def fatal(given: bytes) -> bool:
        return not waits_for_all and given[:1] != OK

    try:
        decision = ranks.consult(answer, conclude, fatal=fatal)
    except RankFailed as error:
        hint = "" if own is None else f" This rank had failed itself: {as_text(own)}"
        raise RankFailed(f"{phase}: {error}.{hint}") from (own or error)
    if decision[:1] == OK:
        return decision[1:]
    own = own or own_decision
    causes = cast(dict[str, Any], json.loads(decision[1:]))
    error = joint_error(phase, causes, alone=len(ranks.all) == 1)
    lost = frozenset(int(rank) for rank in causes["lost"])
    if touched is not None and ranks.rank not in lost:
        names = _all_names(ranks, list(touched()), lost)
        _add_overwritten(error, names)
    if on_failure is not None:
        on_failure(error)
    if own is not None and not isinstance(own, Exception):
        raise own
    raise error from own


def _all_names(ranks: Ranks, names: list[str], lost: frozenset[int]) -> list[str]:
    def join(answers: Answers, _: Mapping[int, str]) -> bytes:
        found = dict.fromkeys(name for answer in answers.values() for name in json.loads(answer))
        return json.dumps(list(found)).encode()

    answer = json.dumps(names).encode()
    try:
        joined = ranks.consult(
            answer, join, fatal=lambda _: False, without=lost, within=_NAMES_SECONDS
        )
    except RankFailed:
        return names
    return json.loads(joined)


def _add_overwritten(error: CheckpointError, names: Iterable[str]) -> None:
    error.overwritten = tuple(names)
    if error.overwritten:
        shown = ", ".join(error.overwritten[:20])
        rest = len(error.overwritten) - 20
        listed = f"{shown} and {rest} more" if rest > 0 else shown
        error.args = (f"{error}. Destinations already overwritten on some rank: {listed}",)


def _forget_in_child() -> None:
    # What a forked process inherits of a save under way will never end in it.
    for memory in _alone.values():
        memory.clear()


os.register_at_fork(after_in_child=_forget_in_child)
