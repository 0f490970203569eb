"""The directory of a run: its checkpoints, and what is known of them without opening any."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from dtckpt.errors import (
    CheckpointError,
    Corrupt,
    InUse,
    NotCommitted,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from dtckpt.logs import logger_of

from ...storage.base import Level, Store
from ...storage.names import check_component
from ..cleaning import time_of
from ..deleting import delete
from ..files.manifest import MANIFEST, Manifest, read_manifest_bytes
from ..files.places import record_path
from ..saving.exiting import AtExit, forget, remember
from ..steps import check_whole, committed_among
from .keep import KnownStep
from .record import StepRecord

logger = logger_of("checkpoint")

PIN = ".pinned"
"""Ends the name of an empty object beside a checkpoint that is to stay."""
ABANDONED = ".abandoned"
"""Ends the name of an empty object beside a checkpoint that the run has gone back from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A committed checkpoint of a run, as one listing tells of it."""

    number: int
    name: str
    is_recorded: bool
    is_pinned: bool
    is_abandoned: bool


@dataclass(frozen=True, slots=True)
class RunListing:
    """What a run holds."""

    steps: tuple[RunStep, ...]
    """Committed checkpoints by number, those that were abandoned too."""
    dead: tuple[str, ...]
    """Directories of checkpoints that are not committed: saves under way, or dead ones."""
    stray: tuple[str, ...]
    """Records and marks of checkpoints that are not there any more."""
    others: tuple[str, ...] = ()
    """Directories with other names."""
    is_checkpoint: bool = False
    """Whether the root is a checkpoint itself."""

    @property
    def line(self) -> tuple[RunStep, ...]:
        """The checkpoints that the run has not gone back from."""
        return tuple(step for step in self.steps if not step.is_abandoned)


class Run:
    """Checkpoints under one root, called ``{prefix}{step}``; others are left alone.

    One process changes a run at a time, any number may look at it.
    """

    at_exit: AtExit = "wait"

    def __init__(self, store: Store, prefix: str = "step-") -> None:
        """Raises ValueError where no directory can be called so."""
        self.store = store
        self.prefix = prefix
        check_component(self.name_of(0))  # one listing is of one level
        self._name = re.compile(rf"{re.escape(prefix)}(\d+)")
        self._records: dict[str, StepRecord] = {}
        """As last noted, read or written, by name."""
        self._unwritten: dict[str, StepRecord] = {}
        """Those that were noted and are still to be written."""
        self._seconds_ahead: float | None = None
        """Of the store's clock, once it was needed."""

    def name_of(self, step: int) -> str:
        """Return what the checkpoint of a step is called."""
        return f"{self.prefix}{step}"

    def place_of(self, step: int) -> Store:
        """Return where the checkpoint of a step is, or will be."""
        return self.store.substore(self.name_of(step))

    def look(self, level: Level | None = None) -> RunListing:
        """List the run: one level, and one request more for every checkpoint without a record."""
        level = self.store.level() if level is None else level
        beside = {info.name for info in level.objects}
        numbers = {
            name: number for name in level.folders if (number := self._number_of(name)) is not None
        }
        committed = committed_among(self.store, list(numbers), beside)
        steps = [
            RunStep(
                number=numbers[name],
                name=name,
                is_recorded=record_path(name) in beside,
                is_pinned=name + PIN in beside,
                is_abandoned=name + ABANDONED in beside,
            )
            for name in committed
        ]
        return RunListing(
            steps=tuple(sorted(steps, key=lambda step: step.number)),
            dead=tuple(sorted(numbers.keys() - committed)),
            stray=tuple(sorted(name for name in beside if self._is_stray(name, committed))),
            others=tuple(sorted(set(level.folders) - numbers.keys())),
            is_checkpoint=MANIFEST in beside,
        )

    def _number_of(self, name: str) -> int | None:
        """Return the step whose checkpoint is called so; None for what is none of this run."""
        match = self._name.fullmatch(name)
        if match is None or name != self.name_of(int(match[1])):
            return None
        return int(match[1])

    def _is_stray(self, name: str, committed: set[str]) -> bool:
        for end in (record_path(""), PIN, ABANDONED):
            own = name.removesuffix(end)
            if own != name and self._number_of(own) is not None:
                return own not in committed
        return False

    def is_ours(self, stray: str) -> bool:
        """Whether a run has left what is called like a record or mark; others may have such names.

        A record is read for that; a mark to stay is whoever pins's to take away.
        """
        if not stray.endswith(record_path("")):
            return not stray.endswith(PIN)
        try:
            StepRecord.from_bytes(self.store.read(stray), f"{self.store.url}/{stray}")
        except ObjectNotFound:
            return False
        except StorageError:
            raise
        except CheckpointError as error:
            logger.warning("left alone: %s", error)
            return False
        return True

    def record(self, step: RunStep) -> StepRecord | None:
        """Return the record of a checkpoint; None if there is none, or a damaged one."""
        is_known = step.is_recorded or step.name in self._unwritten
        return self.record_of(step.number) if is_known else None

    def record_of(self, step: int) -> StepRecord | None:
        """Return the record of a step, if there is a sound one."""
        checkpoint = self.name_of(step)
        if (noted := self._unwritten.get(checkpoint)) is not None:
            return noted
        return self._stored_record(checkpoint)

    def _record_now(self, checkpoint: str) -> StepRecord | None:
        """Return the record as it is now of what is called so; None for what is not of this run."""
        number = self._number_of(checkpoint)
        return None if number is None else self.record_of(number)

    def _stored_record(self, checkpoint: str) -> StepRecord | None:
        name = record_path(checkpoint)
        try:
            found = StepRecord.from_bytes(self.store.read(name), f"{self.store.url}/{name}")
        except ObjectNotFound:
            return None
        except Corrupt as error:
            logger.warning("passing over a record: %s", error)
            return None
        self._records[checkpoint] = found
        return found

    def known(self, step: RunStep, *, may_write: bool = True, is_fresh: bool = False) -> KnownStep:
        """Return what there is to know of a checkpoint.

        That of its manifest where it has no record, which is written then if that is allowed. Its
        metrics are those that were seen last; with ``is_fresh`` also what another process, such as
        an evaluation, has set since.
        """
        seen = None if is_fresh else self._records.get(step.name)
        record = seen or self.record(step)
        if record is None:
            record = self.make_record(step) if may_write else self._record_of_manifest(step)
        return KnownStep(
            number=step.number,
            name=step.name,
            saved_at=record.saved_at,
            metrics=record.metrics,
            bases=frozenset(record.bases),
            is_pinned=step.is_pinned,
            is_abandoned=step.is_abandoned,
        )

    def make_record(self, step: RunStep) -> StepRecord:
        """Write the record of a checkpoint whose save died before; NotCommitted if it is gone."""
        record = self._record_of_manifest(step)
        self.write_record(record)
        return record

    def _record_of_manifest(self, step: RunStep) -> StepRecord:
        place = self.store.substore(step.name)
        manifest = Manifest.from_bytes(read_manifest_bytes(place), f"{place.url}/{MANIFEST}")
        return StepRecord(
            step=step.number,
            save_id=manifest.save_id,
            saved_at=self._time_here(place.stat(MANIFEST).modified),
            bases=bases_of(manifest),
            total_bytes=sum(tensor.stored_bytes for tensor in manifest.tensors.values()),
        )

    def _time_here(self, modified: float | None) -> float:
        """Return a time of the store's clock by that of this machine, as records have it."""
        if modified is None:
            return time.time()
        if self._seconds_ahead is None:
            self._seconds_ahead = time_of(self.store) - time.time()
        return modified - self._seconds_ahead

    def note(self, record: StepRecord) -> None:
        """Know of a checkpoint, as soon as it is committed and from any thread, what is told of it.

        ``write_noted`` writes it. Till then nothing else tells its metrics, so the process does not
        end before.
        """
        name = self.name_of(record.step)
        self._records[name] = self._unwritten[name] = record
        remember(self)

    def write_noted(self) -> None:
        """Write the records of what was noted."""
        for name, record in tuple(self._unwritten.items()):
            self.add_record(record)
            self._unwritten.pop(name, None)
        if not self._unwritten:
            forget(self)

    def end_with_process(self) -> bool:
        """Write what was noted and nobody has waited for."""
        try:
            self.write_noted()
        except CheckpointError as error:
            logger.warning("%s: records were not written: %s", self.store.url, error)
        return True

    def write_record(self, record: StepRecord) -> None:
        """Write or replace the record of a step."""
        name = self.name_of(record.step)
        self.store.publish(record_path(name), record.to_bytes(), overwrite=True)
        self._records[name] = record

    def add_record(self, record: StepRecord) -> None:
        """Write the record of a step; metrics that another process has given it stay."""
        name = self.name_of(record.step)
        try:
            self.store.publish(record_path(name), record.to_bytes(), overwrite=False)
            self._records[name] = record
        except ObjectExists:
            there = self._stored_record(name)
            if there is not None and there.save_id == record.save_id:
                record = replace(record, metrics={**there.metrics, **record.metrics})
            self.write_record(record)

    def detached(self, name: str, save_id: str) -> None:
        """Note that a checkpoint was written anew and refers to no other one any more."""
        record = self._record_now(name)
        if record is not None:
            self.write_record(replace(record, save_id=save_id, bases=()))

    def set_metrics(self, step: RunStep, metrics: Mapping[str, float]) -> None:
        """Add metrics to the record of a checkpoint."""
        record = self.record(step) or self.make_record(step)
        self.write_record(replace(record, metrics={**record.metrics, **metrics}))
        self._unwritten.pop(step.name, None)

    def forget(self, name: str) -> None:
        """Take away the record of a checkpoint that is to be replaced."""
        self._records.pop(name, None)
        self._unwritten.pop(name, None)
        self.store.delete([record_path(name)])

    def mark(self, name: str, mark: str, *, is_set: bool = True) -> None:
        """Set or take away a mark, PIN or ABANDONED, of a checkpoint."""
        if not is_set:
            self.store.delete([name + mark])
            return
        with suppress(ObjectExists):
            self.store.publish(name + mark, b"", overwrite=False)

    def check_whole(self, name: str) -> None:
        """Raise Corrupt or NotCommitted unless manifest and data files are there in full."""
        check_whole(self.store.substore(name))

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest before its data files, and what is kept beside it.

        InUse or Corrupt, and nothing is changed, where others refer to its files or it cannot be
        told to whose files it refers.
        """
        record = self._record_now(name)
        self.forget(name)  # else it would tell of a checkpoint half deleted
        try:
            delete(self.store.substore(name))
        except NotCommitted:
            pass  # somebody else has deleted it
        except (InUse, Corrupt):
            if record is not None:
                self.write_record(record)
            raise
        self.sweep(name)
        self.store.delete([name + PIN, name + ABANDONED])

    def sweep(self, name: str) -> None:
        """Take away the directory of a checkpoint that is gone, if it is empty.

        Of a name that no save ever writes, since one may be at it again.
        """
        self.store.delete([f"{name}/nothing"])


def bases_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the checkpoints to whose files a checkpoint refers."""
    return tuple(sorted({file.source for file in manifest.borrowed}))
