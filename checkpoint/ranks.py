"""The ranks that take part in a save or load, and the rule that they fail together.

``together`` runs one phase on every rank: each gives an answer, the coordinator decides, and all
get the decision, or all raise the same error. Errors travel as text, so no exception has to be
picklable. A rank that dies or falls silent is named in the error of the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, cast

import torch

import dtckpt.errors
from dtckpt.errors import CheckpointError, RankFailed

from ..dtensor.traffic import BY_THREAD, Collective, tell_done
from .rendezvous import Members, members_of
from .text import ranks_text
from .wire import PULSE_SECONDS

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a rank may show no sign of life once another one waits for it."""

Answers = Mapping[int, bytes]
Decide = Callable[[Answers], bytes]

_OK, _FAILED = b"\0", b"\1"
_MISSED = b"\2"
"""Told instead of a decision to a rank that was never heard of: this was not the call it is at."""
_GRACE_SECONDS = 2.0
"""How long the others are still listened to once one rank has told of a failure."""
_STUCK = 6
"""A rank whose work has not got on for so many deadlines shows no signs of life any more."""

_CALLED_OFF = json.dumps(
    {"type": "RankFailed", "text": "another rank failed", "errno": None, "is_certain": False}
).encode()

_OWN_ERRORS = tuple(
    cls
    for cls in vars(dtckpt.errors).values()
    if isinstance(cls, type) and issubclass(cls, CheckpointError)
)


_alone: dict[int, dict[str, Any]] = {}
"""What ranks without a group keep, by their number."""


class CalledOff(Exception):
    """Raised by a rank that leaves a phase because another one has failed in it."""


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

    def consult(
        self,
        answer: bytes,
        decide: Callable[[Answers, Mapping[int, str]], bytes],
        *,
        fatal: Callable[[bytes], bool],
        without: frozenset[int] = frozenset(),
    ) -> bytes:
        """Give an answer and return what the coordinator decides on all of them.

        ``decide`` runs on the coordinator, with the answers and with the ranks that are lost and
        why. Once an answer is ``fatal`` the others are not waited for any longer. Ranks
        ``without`` take no part. Raises RankFailed where the coordinator itself is lost.
        """
        ...

    def at_work(self) -> AbstractContextManager[None]:
        """Show signs of life while the block runs, but not for ever without ``tell_alive``."""
        ...

    def tell_alive(self) -> None:
        """Note that a long phase is getting on; cheap enough to call often."""
        ...

    def is_called_off(self) -> bool:
        """Whether some rank has failed in this phase while this rank is still at it."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End the save or load; others who are still at it learn that this rank is not."""
        ...


class Solo:
    """A single rank without a process group."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.all = (rank,)
        self.memory = _alone.setdefault(rank, {})

    def consult(
        self,
        answer: bytes,
        decide: Callable[[Answers, Mapping[int, str]], bytes],
        *,
        fatal: Callable[[bytes], bool],
        without: frozenset[int] = frozenset(),
    ) -> bytes:
        """Decide on the one answer there is."""
        return decide({self.rank: answer}, {})

    def at_work(self) -> AbstractContextManager[None]:
        """Do nothing: nobody waits."""
        return nullcontext()

    def tell_alive(self) -> None:
        """Do nothing: nobody waits."""

    def is_called_off(self) -> bool:
        """Return False: there is nobody else to do so."""
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing."""


class GroupRanks:
    """The ranks of a process group during one save or load."""

    def __init__(
        self, members: Members, timeout: timedelta = DEFAULT_TIMEOUT, purpose: str = ""
    ) -> None:
        self.rank = members.rank
        self.all = members.all
        self.memory = members.memory
        self._wire = members.wire
        self._timeout = timeout.total_seconds()
        self._purpose = purpose
        self._round = 0
        self._job = self._wire.begin_job(purpose) if self._leads else -1
        self._absent = ""
        self._refusal = b""
        self._progress_at = self._beat_at = time.monotonic()

    @property
    def _leads(self) -> bool:
        return self.rank == self.all[0]

    def consult(
        self,
        answer: bytes,
        decide: Callable[[Answers, Mapping[int, str]], bytes],
        *,
        fatal: Callable[[bytes], bool],
        without: frozenset[int] = frozenset(),
    ) -> bytes:
        """Answer to, or as, the coordinator."""
        self._join()
        if self._absent:
            raise RankFailed(self._absent)
        number = self._round
        self._round += 1
        started = time.perf_counter()
        if not self._leads:
            decision = self._ask(number, answer)
            self._tell_observers(started, len(answer), len(decision))
            return decision
        decision, heard = self._lead(number, answer, decide, fatal, without)
        others = len(self.all) - 1 - len(without)
        self._tell_observers(started, len(decision) * others, heard)
        return decision

    def _tell_observers(self, started: float, sent_bytes: int, received_bytes: int) -> None:
        """Tell those who watch the traffic what went over the wire, not counting its frames."""
        if BY_THREAD:
            agreement = Collective(
                kind="agreement",
                group=self._wire,
                ranks=self.all,
                rank=self.all.index(self.rank),
                sent_bytes=sent_bytes,
                received_bytes=received_bytes,
                agreed=self._purpose,
                started=started,
            )
            tell_done(agreement)

    def _join(self) -> None:
        """Join the coordinator's job, and see whether it is the one that this rank is at."""
        if self._job >= 0 or self._absent:
            return
        first = self.all[0]
        patience = 2 * self._timeout + _GRACE_SECONDS
        found = self._wire.join_job(patience)
        if found is None:
            self._absent = (
                f"rank {first}, which coordinates {ranks_text(self.all)}, did not begin a "
                f"{self._purpose or 'call'} within {patience:g} s or is gone. All ranks make the "
                "same calls in the same order"
            )
            return
        self._job, purpose = found
        self._wire.tell_alive(self._job)  # whoever falls silent from here on was at this call
        if purpose != self._purpose:
            text = (
                f"this rank calls {self._purpose} where rank {first} calls {purpose}. All ranks "
                "make the same calls in the same order"
            )
            self._refusal = _FAILED + _told(CheckpointError(text))

    def _ask(self, number: int, answer: bytes) -> bytes:
        first = self.all[0]
        self._wire.send((first,), self._job, number, self._refusal or answer)
        # The coordinator may itself have to wait that long for another rank before it decides.
        patience = 2 * self._timeout + _GRACE_SECONDS
        found, lost = self._wire.collect(self._job, number, (first,), patience)
        if lost:
            raise RankFailed(
                f"rank {first}, which coordinates {ranks_text(self.all)}, is lost: {lost[first]}"
            )
        if found[first] != _MISSED:
            return found[first]
        self._wire.end_job(self._job, "")
        self._job, self._refusal = -1, b""
        self._join()
        if self._absent:
            raise RankFailed(self._absent)
        return self._ask(number, answer)

    def _lead(
        self,
        number: int,
        answer: bytes,
        decide: Callable[[Answers, Mapping[int, str]], bytes],
        fatal: Callable[[bytes], bool],
        without: frozenset[int],
    ) -> tuple[bytes, int]:
        """Return the decision and how many bytes it was made from."""
        others = [rank for rank in self.all[1:] if rank not in without]
        failed_at = time.monotonic() if fatal(answer) else None

        def is_enough(new: Mapping[int, bytes]) -> bool:
            nonlocal failed_at
            if failed_at is None and any(map(fatal, new.values())):
                failed_at = time.monotonic()
            return failed_at is not None and time.monotonic() - failed_at >= _GRACE_SECONDS

        try:
            answers, lost = self._wire.collect(
                self._job,
                number,
                others,
                self._timeout,
                is_enough,
                lambda: self._wire.tell_alive(self._job),
            )
            with self.at_work():
                decision = decide({self.rank: answer, **dict(sorted(answers.items()))}, lost)
        except BaseException as error:  # interrupted: the others must not wait for it
            told = _failure({self.rank: _told(error)}, {})
            self._wire.send(others, self._job, number, told)
            raise
        absent = [r for r in lost if not self._wire.has_heard(self._job, r)]
        self._wire.send(absent, self._job, number, _MISSED)
        self._wire.send([r for r in others if r not in absent], self._job, number, decision)
        return decision, sum(map(len, answers.values()))

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Have the wire show signs of life, which stop once nothing has got on for long."""
        self._join()
        if self._absent:
            yield
            return
        self._progress_at = time.monotonic()
        interval = min(self._timeout / 5, PULSE_SECONDS)

        def pulse() -> bool:
            now = time.monotonic()
            if now - self._progress_at > _STUCK * self._timeout or now - self._beat_at < interval:
                return False
            self._beat_at = now
            return True

        self._wire.set_pulse(self._job, interval, pulse)
        try:
            yield
        finally:
            self._wire.set_pulse(self._job, interval, None)

    def tell_alive(self) -> None:
        """Note the time; the wire does the rest."""
        self._progress_at = time.monotonic()

    def is_called_off(self) -> bool:
        """Whether the decision, or a failure, is there before this rank's answer."""
        arrived = self._wire.arrived(self._job, self._round)
        return any(given[:1] != _OK for given in arrived) if self._leads else bool(arrived)

    def close(self, error: BaseException | None = None) -> None:
        """Forget what was said in this save or load, and tell those who still wait."""
        if self._job >= 0:
            reason = f"it has given up: {_as_text(error)}" if error is not None else ""
            self._wire.end_job(self._job, reason)


def ranks_of(
    process_group: Any = None,
    *,
    no_dist: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
    purpose: str = "",
) -> Ranks:
    """Return the ranks of a group, of the default group if there is one, or this one alone.

    All ranks of the group call this in the same order and for the same ``purpose``; the first call
    on a group is collective.
    """
    if no_dist:
        # Alone, but still itself: what a rank keeps for itself is found under its number.
        available = torch.distributed.is_available() and torch.distributed.is_initialized()
        return Solo(torch.distributed.get_rank() if available else 0)
    if process_group is not None:
        if not hasattr(process_group, "rank"):  # what torch gives to ranks outside of a new group
            raise CheckpointError(
                "this rank is not a member of the process group that it was given; only the "
                "members of a group may call save and load with it"
            )
        return GroupRanks(members_of(process_group), timeout, purpose)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return GroupRanks(members_of(torch.distributed.group.WORLD), timeout, purpose)
    return Solo()


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
        with ranks.at_work():
            answer = _OK + body()
    except BaseException as error:
        own, answer = error, _FAILED + _told(error)

    def conclude(answers: Answers, lost: Mapping[int, str]) -> bytes:
        nonlocal own_decision
        failed = {rank: given[1:] for rank, given in answers.items() if given[:1] != _OK}
        if failed or lost:
            causes = {rank: told for rank, told in failed.items() if told != _CALLED_OFF}
            return _failure(causes if causes or lost else failed, lost, is_certain=True)
        try:
            return _OK + decide({rank: given[1:] for rank, given in answers.items()})
        except BaseException as error:
            own_decision = error
            return _failure({ranks.all[0]: _told(error)}, {})

    waits_for_all = touched is not None  # names what was overwritten on every rank

    def fatal(given: bytes) -> bool:
        return not waits_for_all and given[:1] != _OK

    try:
        decision = ranks.consult(answer, conclude, fatal=fatal)
    except RankFailed as error:
        hint = "" if own is None else f" This rank had failed itself: {_as_text(own)}"
        raise RankFailed(f"{phase}: {error}.{hint}") from (own or error)
    if decision[:1] == _OK:
        return decision[1:]
    own = own or own_decision
    told = cast(dict[str, Any], json.loads(decision[1:]))
    error = _error(phase, told, alone=len(ranks.all) == 1)
    lost = frozenset(int(rank) for rank in told["lost"])
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

    try:
        answer = json.dumps(names).encode()
        return json.loads(ranks.consult(answer, join, fatal=lambda _: False, without=lost))
    except RankFailed:
        return names


def _add_overwritten(error: CheckpointError, names: Iterable[str]) -> None:
    error.overwritten = tuple(names)
    if error.overwritten:
        shown = ", ".join(error.overwritten[:20])
        rest = len(error.overwritten) - 20
        told = f"{shown} and {rest} more" if rest > 0 else shown
        error.args = (f"{error}. Destinations already overwritten on some rank: {told}",)


def _told(error: BaseException) -> bytes:
    """Return the type, if it is one of ours or derived from it, and the text; never raises."""
    if isinstance(error, CalledOff):
        return _CALLED_OFF
    ours = [cls.__name__ for cls in type(error).__mro__ if cls in _OWN_ERRORS]
    text = _safe_str(error)
    if not ours or type(error) not in _OWN_ERRORS:
        text = f"{type(error).__name__}: {text}"
    return json.dumps(
        {
            "type": ours[0] if ours else None,
            "text": text,
            "errno": error.errno if isinstance(error, OSError) else None,
            "is_certain": isinstance(error, CheckpointError) and error.is_certain,
        }
    ).encode()


def _failure(
    failed: Mapping[int, bytes], lost: Mapping[int, str], *, is_certain: bool = False
) -> bytes:
    """Return the decision that a phase has failed, and whether it is certain to have no effect."""
    told = {rank: json.loads(failure) for rank, failure in failed.items()}
    is_certain = is_certain or all(failure["is_certain"] for failure in told.values())
    value = {"failed": told, "lost": lost, "is_certain": is_certain}
    return _FAILED + json.dumps(value).encode()


def _as_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {_safe_str(error)}"


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"(its text could not be made: {type(broken).__name__})"


def _error(phase: str, told: dict[str, Any], *, alone: bool) -> CheckpointError:
    failed, lost = told["failed"], told["lost"]
    by_text: dict[str, list[int]] = {}
    for rank, failure in failed.items():
        by_text.setdefault(failure["text"], []).append(int(rank))
    if alone:
        message = f"{phase}: {next(iter(by_text))}"
    else:
        parts = [f"{phase} failed on {ranks_text(r)}: {text}" for text, r in by_text.items()]
        parts += [f"{phase} failed: rank {rank} is lost: {why}" for rank, why in lost.items()]
        message = "\n".join(parts)
    names = {failure["type"] for failure in failed.values()}
    cls = next((c for c in _OWN_ERRORS if names == {c.__name__}), CheckpointError)
    error = cls(message) if failed else RankFailed(message)
    error.is_certain = told["is_certain"]
    numbers = {failure["errno"] for failure in failed.values()}
    if isinstance(error, OSError) and len(numbers) == 1:
        error.errno = numbers.pop()
    return error


def _forget_in_child() -> None:
    # What a forked process inherits of a save under way will never end in it.
    for memory in _alone.values():
        memory.clear()


os.register_at_fork(after_in_child=_forget_in_child)
