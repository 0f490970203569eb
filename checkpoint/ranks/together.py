"""The ranks that take part in a save or load, and the rule that they fail together.

``together`` runs one phase on every rank: each gives an answer, the coordinator decides, and all
get the decision, or all raise the same error. A rank that dies, falls silent or does not get on is
named in the error of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import PurePath
from typing import Any, cast

import torch

from dtckpt.errors import CheckpointError, RankFailed
from dtckpt.interrupts import raised_by_signal_handler

from .base import DEFAULT_TIMEOUT, Answers, Ranks, Round, Solo
from .call import target_number
from .failing import CALLED_OFF, FAILED, OK, as_text, failure, joint_error, told
from .frames import check_size
from .greeting import PURPOSE_BYTES
from .group_ranks import GroupRanks
from .rendezvous import members_of, numbers_of

Decide = Callable[[Answers], bytes]

_NAMES_SECONDS = 10.0
"""How long ranks wait for each other to say what a failed phase has overwritten."""


def ranks_of(
    process_group: Any = None,
    *,
    no_dist: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
    purpose: str = "",
    wrong: str = "",
    target: object = "",
) -> Ranks:
    """Return the ranks of a group, of the default group if there is one, or this one alone.

    All ranks of the group call this in the same order and for the same ``purpose``. ``target`` is
    the path or the store that the call is about: by it ranks find each other where one of them has
    made a call less than the others. ``wrong`` says
    what is wrong with the arguments of this rank's call: the first phase fails with it, on all
    ranks; so it does for a ``timeout`` or a group that is none.
    """
    if len(purpose.encode()) > PURPOSE_BYTES:
        raise ValueError(f"a purpose has at most {PURPOSE_BYTES} bytes, got {purpose!r}")
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
    call = numbers_of(process_group).enter()
    members = members_of(process_group, timeout.total_seconds())
    about = target_number(purpose, _text_of(target))
    return GroupRanks(members, call, timeout, purpose, wrong, about)


def _text_of(target: object) -> str:
    """Return the path or URL of a target; "" where it is none, and of objects with code to run."""
    if isinstance(target, str | PurePath):
        return str(target)
    url = getattr(target, "url", "")
    return url if isinstance(url, str) else ""


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
    give_up: Callable[[], None] | None = None,
    without: frozenset[int] = frozenset(),
) -> bytes:
    """Run ``body`` on every rank and return the decision, or raise the same error on all ranks.

    ``decide`` runs on the coordinator with the answers of all ranks, in their order, and its
    result is what every rank gets. ``phase`` is what messages call this part of the work, for
    instance "save: write". The error is of the type that the failing rank raised if that is one of
    ours, RankFailed if a rank is lost, else CheckpointError. An exception that is not an
    ``Exception`` (Ctrl-C), or that a signal handler raises, is told to the others and raised as
    it is.

    ``on_failure`` is called with the error once it is certain that the coordinator has decided so;
    not where the coordinator was lost, since it may have decided otherwise. ``touched`` names what
    this rank has overwritten, whether it failed or not; it is asked, on every rank, only after a
    failure. ``give_up`` is called where this rank fails, before it tells the others, some of whom
    may wait for it elsewhere in this phase. Ranks that are known to be lost are left out by all
    others: they go on ``without``.
    """
    own: BaseException | None = None
    own_decision: BaseException | None = None
    try:
        ranks.begin(phase)
        answer = OK + body()
        check_size(answer)
    except BaseException as error:
        if give_up is not None:
            give_up()
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
        decision = ranks.consult(answer, Round(decide=conclude, fatal=fatal, without=without))
    except RankFailed as error:
        hint = "" if own is None else f" This rank had failed itself: {as_text(own)}"
        raise RankFailed(f"{phase}: {error}.{hint}") from (own or error)
    if decision[:1] == OK:
        return decision[1:]
    own = own or own_decision
    causes = cast(dict[str, Any], json.loads(decision[1:]))
    error = joint_error(phase, causes, alone=len(ranks.all) == 1)
    lost = without | frozenset(int(rank) for rank in causes["lost"])
    if touched is not None and ranks.rank not in lost:
        names = _all_names(ranks, list(touched()), lost)
        _add_overwritten(error, names)
    if on_failure is not None:
        on_failure(error)
    if own is not None and (not isinstance(own, Exception) or raised_by_signal_handler(own)):
        raise own
    raise error from own


def _all_names(ranks: Ranks, names: list[str], lost: frozenset[int]) -> list[str]:
    def join(answers: Answers, _: Mapping[int, str]) -> bytes:
        found = dict.fromkeys(name for answer in answers.values() for name in json.loads(answer))
        return json.dumps(list(found)).encode()

    asked = Round(decide=join, fatal=lambda _: False, without=lost, within=_NAMES_SECONDS)
    try:
        return json.loads(ranks.consult(json.dumps(names).encode(), asked))
    except RankFailed:
        return names


def _add_overwritten(error: CheckpointError, names: Iterable[str]) -> None:
    error.overwritten = tuple(names)
    if error.overwritten:
        shown = ", ".join(error.overwritten[:20])
        rest = len(error.overwritten) - 20
        listed = f"{shown} and {rest} more" if rest > 0 else shown
        error.args = (f"{error}. Destinations already overwritten on some rank: {listed}",)
