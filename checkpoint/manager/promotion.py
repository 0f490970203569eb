"""Promotion: what was saved to a fast place of a run is brought to those after it.

It is done by the ranks that have saved, in the thread of their save, and over its connections: each
copies the file that it wrote itself, since one host's bandwidth is not enough. The coordinator
says when: one promotion follows the other, and what has been overtaken by then is left out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dtckpt.errors import Busy, CheckpointError, RankFailed
from dtckpt.logs import logger_of

from ...storage.base import Store
from ..copying import check_standing_alone, copy_file
from ..files.committing import check_complete, check_free, commit, discard, find_manifest
from ..files.manifest import FileRecord, Manifest, read_own_manifest
from ..files.places import MANIFEST
from ..ranks.failing import CalledOff
from ..ranks.text import ranks_text
from ..ranks.together import Answers, Ranks, closing, ranks_of, together
from ..runs.places import Place, Places
from ..runs.run import ABANDONED
from ..saving.exiting import AtExit, forget, remember

logger = logger_of("checkpoint")

_LOOK_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class Ticket:
    """One checkpoint on its way."""

    step: int
    must: bool
    """Whether it may not be left out."""
    is_committed: bool = False
    """Whether it is in the first place by now."""
    is_done: bool = False
    ranks: Ranks | None = None


@dataclass(slots=True, eq=False)
class Promotions:
    """What this rank has to bring from the first place to the others."""

    places: Places
    group: Mapping[str, Any]
    """Arguments of ``ranks_of``."""
    on_failure: Callable[[int, CheckpointError], object]
    """Told of the step and the error, the same on all ranks."""
    timeout: timedelta
    """So long a part that does not get on is waited for."""
    at_exit: AtExit = "wait"
    lacking: CheckpointError | None = None
    """Why the newest checkpoint is not at the durable place, if that has failed."""
    _tickets: list[Ticket] = field(default_factory=list[Ticket])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def announce(self, step: int, *, must: bool) -> Ticket | None:
        """Note that a step is about to be saved; from now on the first place does not lose it.

        None where there is only one place.
        """
        if len(self.places.way) == 1:
            return None
        every = self.places.durable.upkeep.keep.every
        is_milestone = every is not None and step % every == 0
        ticket = Ticket(step, must or is_milestone)
        with self._changed:
            self._tickets.append(ticket)
        remember(self)  # the process does not end before it is there
        return ticket

    def withdraw(self, ticket: Ticket | None) -> None:
        """Note that it has been brought everywhere, or is not going to be."""
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            if not self._tickets:
                forget(self)
            self._changed.notify_all()

    def steps(self) -> list[int]:
        """Return the steps on their way."""
        with self._changed:
            return [ticket.step for ticket in self._tickets if not ticket.is_done]

    def end_with_process(self) -> bool:
        """Bring to its end what is on its way when nobody has waited for it."""
        try:
            self.wait()
        except Busy as error:
            logger.warning("given up at the end of the process: %s", error)
            return False
        return self.lacking is None

    def wait(self, *, after: int = -1) -> None:
        """Wait until no step ``after`` a given one is on its way.

        Busy once this rank's part does not get on.
        """
        began, timeout = time.monotonic(), self.timeout
        with self._changed:
            while waiting := [ticket for ticket in self._tickets if ticket.step > after]:
                self._changed.wait(_LOOK_SECONDS)
                stalled = min(
                    (t.ranks.stalled_seconds() for t in waiting if t.ranks is not None),
                    default=0.0,
                )
                if min(stalled, time.monotonic() - began) > timeout.total_seconds():
                    raise Busy(
                        f"bringing the checkpoints of steps {[t.step for t in waiting]} to "
                        f"the root of the run has not got on for {timeout.total_seconds():g} s. "
                        "Its storage seems to hang; they are in the first tier"
                    )

    def begin_restored(self, step: int, url: str) -> None:
        """Bring on what was restored from ``url``, unless it is there already; all ranks call it.

        A process that died may not have come to it.
        """
        if self.places.after(self.places.of(step, url)):
            self.begin(self.announce(step, must=False), url)

    def begin(self, ticket: Ticket | None, url: str) -> None:
        """Do what ``bring`` does in a thread and by a call of its own."""
        if ticket is None:
            return
        ranks = ranks_of(**self.group, purpose="promote", target=url)

        def promote() -> None:
            with closing(ranks):
                self.bring(ticket, ranks, url)

        threading.Thread(target=promote, name="dtckpt-promote", daemon=True).start()

    def leave_out(self, ticket: Ticket | None, lost: Sequence[int]) -> None:
        """Note that a checkpoint stays where it is: ranks were lost that would have to bring it."""
        if ticket is not None:
            ticket.is_done = True
            who = f"{ranks_text(lost)} died or fell silent during the save"
            self._failed(ticket, RankFailed(f"promote: {who}"), is_durable=True)
            self.withdraw(ticket)

    def bring(self, ticket: Ticket | None, ranks: Ranks, url: str) -> None:
        """Bring a checkpoint to all places after the one where it was committed, at ``url``.

        All ranks call it, each in a thread of its own; failures are told and not raised.
        """
        if ticket is None:
            return
        with self._changed:
            ticket.ranks, ticket.is_committed = ranks, True
            self._changed.notify_all()
        source = self.places.of(ticket.step, url)
        try:
            if self._is_wanted(ticket, ranks):
                self._bring_on(ticket, ranks, source)
        except Exception as error:
            logger.exception("step %d was not promoted", ticket.step)
            self._failed(ticket, CheckpointError(f"promote: {error!r}"), is_durable=True)
        finally:
            ticket.is_done = True
            if ranks.is_coordinator:
                source.worker.do(source.upkeep.retain)
            self.withdraw(ticket)

    def _is_wanted(self, ticket: Ticket, ranks: Ranks) -> bool:
        """Wait for this checkpoint's turn; whether nothing newer takes its place by then."""

        def wait_for_turn() -> bytes:
            if not ranks.is_coordinator:
                return b""
            with self._changed:
                while not self._is_overtaken(ticket) and self._tickets[0] is not ticket:
                    self._changed.wait(_LOOK_SECONDS)
                    ranks.tell_alive()
                return b""

        def choose(_: Answers) -> bytes:
            with self._changed:
                return b"" if self._is_overtaken(ticket) else b"go"

        try:
            is_wanted = bool(together(ranks, "promote: wait", wait_for_turn, choose))
        except CheckpointError as error:
            self._failed(ticket, error, is_durable=True)
            return False
        if not is_wanted and ranks.is_coordinator:
            logger.info("step %d is not promoted: a newer one is there by now", ticket.step)
        return is_wanted

    def _is_overtaken(self, ticket: Ticket) -> bool:
        later = self._tickets[self._tickets.index(ticket) + 1 :]
        return not ticket.must and any(other.is_committed for other in later)

    def _bring_on(self, ticket: Ticket, ranks: Ranks, source: Place) -> None:
        for target in self.places.after(source):
            is_durable = target is self.places.durable
            try:
                _Promotion(ranks, ticket, self.places, source, target).run()
            except CheckpointError as error:
                self._failed(ticket, error, is_durable=is_durable)
                if isinstance(error, RankFailed):  # nobody is there to go on with
                    self.lacking = error
                    break
            else:
                if is_durable:
                    self.lacking = None

    def _failed(self, ticket: Ticket, error: CheckpointError, *, is_durable: bool) -> None:
        logger.warning("step %d was not promoted, and stays where it is: %s", ticket.step, error)
        if is_durable:
            self.lacking = error
        self.on_failure(ticket.step, error)


class _Promotion:
    """One checkpoint on its way to one place, on one rank."""

    _manifest: Manifest
    """On the coordinator, once it has looked."""

    def __init__(
        self, ranks: Ranks, ticket: Ticket, places: Places, origin: Place, target: Place
    ) -> None:
        self._ranks = ranks
        self._ticket = ticket
        self._places = places
        self._origin = origin
        self._place = target
        self._source = origin.run.place_of(ticket.step)
        self._target = target.run.place_of(ticket.step)
        self._created: list[int] = []
        """Ranks whose files this rank has copied."""
        self._save_id = ""

    def run(self) -> None:
        """Copy what this rank has to copy, and let the coordinator commit."""
        plan = json.loads(together(self._ranks, "promote: look", lambda: b"", self._look))
        if plan is None:
            return
        self._save_id = plan["save_id"]
        mine = [
            record
            for record in map(FileRecord.from_json, plan["files"])
            if copied_by(record.rank, self._ranks.all) == self._ranks.rank
        ]

        def copy_own() -> bytes:
            for record in mine:
                if copy_file(self._source, self._target, record, self._save_id, self._on_bytes):
                    self._created.append(record.rank)
            return b""

        together(
            self._ranks, "promote: copy", copy_own, self._check, on_failure=self._discard_if_certain
        )
        together(
            self._ranks,
            "promote: commit",
            lambda: b"",
            self._commit,
            on_failure=self._discard_if_certain,
        )

    def _look(self, _: Answers) -> bytes:
        """Return what there is to copy; nothing if it is there already."""
        # It may be about to delete what stands there, and the other ranks wait meanwhile.
        self._place.worker.wait(self._ranks.tell_alive)
        manifest = read_own_manifest(self._source)
        check_standing_alone(self._source, manifest)
        there = _save_id_at(self._target)
        if there == manifest.save_id:
            return b"null"
        name = self._place.run.name_of(self._ticket.step)
        if there is not None and self._place.run.store.exists(name + ABANDONED):
            self._place.run.delete(name)  # the place did not answer when it was to make way
        check_free(self._target, overwrite=False)
        self._manifest = manifest
        files = [record.to_json() for record in manifest.files]
        return json.dumps({"save_id": manifest.save_id, "files": files}).encode()

    def _on_bytes(self, num_bytes: int) -> None:
        self._ranks.tell_alive()
        if self._ranks.is_called_off():
            raise CalledOff

    def _check(self, _: Answers) -> bytes:
        check_complete(self._target, self._manifest)
        return b""

    def _commit(self, _: Answers) -> bytes:
        commit(self._target, self._manifest, overwrite=False)
        try:  # now: the tier may lose what is on no way any more, and its record with it
            self._places.pass_on_record(self._origin, self._place, self._ticket.step)
        except CheckpointError as error:
            logger.warning("%s has no record of its metrics: %s", self._target.url, error)
        self._place.worker.do(self._place.upkeep.retain)
        return b""

    def _discard_if_certain(self, error: CheckpointError) -> None:
        if error.is_certain:  # else it may have been committed, or yet be
            for rank in self._created:
                discard(self._target, self._save_id, rank)


def copied_by(writer: int, ranks: tuple[int, ...]) -> int:
    """Return which rank copies the file of a writer: itself, if it is there.

    >>> [copied_by(writer, (0, 1, 2)) for writer in (1, 2, 5)]
    [1, 2, 2]
    """
    return writer if writer in ranks else ranks[writer % len(ranks)]


def _save_id_at(place: Store) -> str | None:
    text = find_manifest(place)
    if text is None:
        return None
    return Manifest.from_bytes(text, f"{place.url}/{MANIFEST}").save_id
