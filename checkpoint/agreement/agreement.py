"""Which call of all ranks is the one that saves, when something unforeseen asks for it.

No collective takes part, and no connection is kept: docs/decisions/0045.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dtckpt.errors import RankFailed
from dtckpt.logs import logger_of

from ..ranks.base import DEFAULT_TIMEOUT
from .gate import Agreed, CallGate
from .register import GroupGone, meet
from .voter import HELD_SECONDS, Pace, Voter

logger = logger_of("checkpoint")

_JOIN_SECONDS = 2.0
"""How long an agreement that ends waits for its thread, which may hang in a store."""
_GRACE_SECONDS = 10.0

_Request = tuple[str, float | None]
_Inbox = queue.SimpleQueue[_Request | None]
"""What a rank is asked for; None ends the thread. Its ``put`` may interrupt itself."""


class Agreement:
    """Which call of all ranks is the one that saves, when something unforeseen asks for it.

    All ranks of the group make one, like other calls of the group, and call ``at_call`` equally
    often. What is asked on any rank is answered on all of them by the same call, within ``poll``
    and the time of a call. Calls are held only while all say which is their next one: milliseconds,
    and half a minute if a rank dies just then.

    >>> agreement = Agreement()
    >>> agreement.at_call()
    >>> agreement.ask("SIGUSR1")
    >>> str(agreement.at_call())
    'SIGUSR1'
    >>> agreement.close()
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        no_dist: bool = False,
        poll: timedelta = timedelta(seconds=1),
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        """``poll`` is how often a rank looks whether another one was asked.

        ``timeout`` is how long ranks wait for one that does not answer, which a process does
        whatever its training is at; and, here, for one that does not come to this call.
        """
        if not poll > timedelta(0):
            raise ValueError(f"poll is a datetime.timedelta above zero, got {poll!r}")
        place = meet(process_group, no_dist=no_dist, timeout=timeout)
        seconds = timeout.total_seconds()
        self._gate = CallGate(HELD_SECONDS + _GRACE_SECONDS)
        self._inbox: _Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        if place.register is not None:
            pace = Pace(poll.total_seconds(), seconds, len(place.ranks))
            voter = Voter(place.register, self._gate, place.ranks, place.index, pace)
            self._thread = threading.Thread(
                target=_serve,
                args=(voter, self._gate, self._inbox),
                name="dtckpt-agreement",
                daemon=True,
            )
            self._thread.start()
            # Who forgets one must not keep its thread, nor be kept by it.
            weakref.finalize(self, self._inbox.put, None).atexit = False
            _open.add(self)

    def ask(self, reason: str, within: timedelta | None = None) -> None:
        """Ask for a save at the next call that all ranks can agree on; returns at once.

        From any thread of any rank, and from signal handlers. What is asked before that call is
        answered by it; ``reason`` says what was asked, for all ranks. ``within`` is how long the
        answer may take.
        """
        limit = None if within is None else time.monotonic() + within.total_seconds()
        self._inbox.put((reason, limit))

    def at_call(self) -> Agreed | None:
        """Return why all ranks save at this call; None if they do not.

        Once per step, or per any number of steps, in one thread, equally often on all ranks. Takes
        less than a microsecond while nothing is asked. Raises RankFailed, with the same text on
        every rank, if something was asked and a rank did not answer; nothing is left of it then.
        """
        if self._thread is None and not self._inbox.empty():
            self._decide_alone()
        return self._gate.enter()

    def _decide_alone(self) -> None:
        found: Agreed | None = None
        with suppress(queue.Empty):
            while True:
                request = self._inbox.get_nowait()
                if request is not None and not self._is_closed:
                    new = Agreed((request[0],), request[1])
                    found = found.joined(new) if found else new
        if found is not None:
            self._gate.let_go(self._gate.hold(), found)

    def close(self) -> None:
        """End it; other ranks are told that this one makes no more calls.

        Never waits long, whatever has become of the group. Closing again does nothing.
        """
        self._is_closed = True
        _open.discard(self)
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _serve(voter: Voter, gate: CallGate, inbox: _Inbox) -> None:
    """Take turns until the agreement is closed."""
    problem = "some rank makes no more calls"
    try:
        for pause in voter.steps():
            if not _listen(inbox, voter, pause):
                with suppress(Exception):  # nobody may be there any more
                    voter.end()
                gate.let_go()
                return
    except GroupGone:
        problem = "the process group is gone"
    except Exception as error:
        problem = f"the store of the process group does not answer: {error}".partition("\n")[0]
        logger.warning("this rank hears no more of saves that are asked for: %s", problem)
    if voter.is_asked:
        gate.fail(RankFailed(f"the ranks cannot agree on a call at which they save: {problem}"))
    while (request := inbox.get()) is not None:
        logger.error("there is no save for %s: %s", request[0], problem)


def _listen(inbox: _Inbox, voter: Voter, seconds: float) -> bool:
    """Wait for requests, at most some seconds, and pass them on; False if it is to end."""
    try:
        request = inbox.get(timeout=seconds) if seconds else inbox.get_nowait()
        while request is not None:
            voter.ask(*request)
            request = inbox.get_nowait()
    except queue.Empty:
        return True
    return False


_open: weakref.WeakSet[Agreement] = weakref.WeakSet()


def _close_all() -> None:
    # A thread that comes back from a store while the interpreter goes would abort the process.
    for agreement in list(_open):
        agreement.close()


atexit.register(_close_all)
