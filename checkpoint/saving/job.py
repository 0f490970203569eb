"""One save on one rank, phase by phase, each run together with all others."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, cast

from dtckpt.errors import Cancelled, CheckpointError, StorageError
from dtckpt.logs import logger_of

from ...storage.base import Store
from ...storage.open import open_store
from ..files.blocks import digest
from ..files.borrowing import Borrowed, Lender, open_base, refuse_if_going
from ..files.committing import check_complete, check_free, commit, discard
from ..files.manifest import MANIFEST, BorrowedFile, FileRecord, Manifest, read_manifest_bytes
from ..files.writing import Chunk, Contents, Progress, in_file_order, write_file
from ..ranks.failing import CalledOff
from ..ranks.text import ranks_text
from ..ranks.together import DEFAULT_TIMEOUT, Answers, Ranks, Solo, together
from ..staging.area import StagingArea, copy_all
from ..staging.quiet import Spreading, quiet_memory
from ..staging.spread import Spread
from ..staging.witness import witnesses
from ..state.collector import paused_collector
from ..state.limits import MAX_JSON_NESTING, check_nesting
from ..state.tree import GiveState
from ..tensors.local_tensor import LocalTensor, local_tensor
from ..tensors.sampling import Sampling
from ..tensors.spec import PerRankPart, TensorSpecs, Values, fingerprint, split_per_rank
from ..tensors.ties import find_ties
from ..tensors.transfer import TensorSource
from ..timing.costs import Costs
from ..timing.recorder import Recorder, Told
from .agreeing import Agreement, Description, PlanMemory, agree
from .copies import compare_copies
from .flattening import flatten

logger = logger_of("checkpoint")

CheckReplicas = Literal["error", "warn"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did, as one rank saw it."""

    url: str
    save_id: str
    num_tensors: int
    total_bytes: int
    """Bytes of all tensors, each counted once."""
    written_bytes: int
    """Bytes that this rank wrote, headers and checksums included."""
    borrowed_bytes: int = 0
    """Bytes of this rank's part that have not changed since the base and were not written."""
    bases: tuple[str, ...] = ()
    """Names of the checkpoints beside this one to whose files it refers, on whatever rank."""
    disagreements: tuple[str, ...] = ()
    """Parts of replicated tensors whose copies differ, where ``check_replicas="warn"``."""
    costs: Costs = field(repr=False, compare=False)
    """Seconds and bytes of each phase, on this rank and over all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a caller may choose for a save."""

    overwrite: bool = False
    metadata: Any = None
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    allow_pickle: bool = False
    check_replicas: CheckReplicas = None
    base: str | os.PathLike[str] | Store | None = None
    elsewhere: Sequence[str | os.PathLike[str] | Store] = ()
    timeout: timedelta = DEFAULT_TIMEOUT


class SaveJob:
    """One save on one rank: ``plan``, perhaps ``stage``, then ``finish``."""

    store: Store
    base: Store | None = None
    agreed: Agreement
    tensors: dict[str, LocalTensor]
    objects: tuple[Any, ...]
    """Modules, optimizers and others whose state dicts the state has."""
    chunks: list[Chunk]
    """What this rank writes."""
    metadata: Any
    """What the user gave, as it was at the call; on the coordinator."""
    metadata_digest: str
    """Of what the user gave on this rank; empty if that is nothing."""

    def __init__(self, ranks: Ranks, options: SaveOptions) -> None:
        self.ranks: Ranks = ranks
        self.options = options
        self.cancelled = threading.Event()
        self.disagreements: tuple[str, ...] = ()
        self.lender: Lender | None = None
        self.borrowed = Borrowed()
        self.elsewhere: tuple[Store, ...] = ()
        """Where to write what the store does not take."""
        self.unusable: StorageError | None = None
        """What is known to be wrong with the store before anything is written, on one rank."""
        self.written_bytes = 0
        self.total_bytes = 0
        self.held_bytes = 0
        """Bytes of tensors that this rank holds; known only if it is logged."""
        self.spread: Spread | None = None
        """Copies that are made while the training goes on."""
        self.recorder = Recorder("save", ranks)
        self.has_copied = False
        self._image: memoryview | None = None

    def plan(
        self,
        state: GiveState,
        target: str | os.PathLike[str] | Store,
        *,
        first: Callable[[], None],
    ) -> None:
        """Agree with all ranks on who writes what; ``first`` is called before all else."""
        with self.recorder.phase("plan"):
            self.plan_together(state, target, first)

    def plan_together(
        self,
        state: GiveState,
        target: str | os.PathLike[str] | Store,
        first: Callable[[], None],
    ) -> None:
        """Agree, compare what ranks hold alike, read the base, and find what this rank writes."""

        def describe() -> Description:
            with self.recorder.phase("queue"):
                first()
            return self.describe(state, target)

        memory = self.ranks.memory.setdefault("plans", PlanMemory())
        self.agreed = agree(self.ranks, memory, "save: plan", describe)
        self.compare_copies()
        self.read_base()
        with paused_collector():
            self.chunks = in_file_order(self.own_chunks())
            self.total_bytes = sum(c.box.numel * c.dtype.itemsize for c in self.chunks)
        if logger.isEnabledFor(logging.INFO):
            self.held_bytes = sum(
                part.nbytes for tensor in self.tensors.values() for _, part in tensor.parts
            )

    def describe(self, state: GiveState, target: str | os.PathLike[str] | Store) -> Description:
        """Flatten the state and return what this rank says of it."""
        storage_options = self.options.storage_options
        self.store = open_store(target, **storage_options)
        self.elsewhere = tuple(open_store(place) for place in self.options.elsewhere)
        if self.ranks.is_coordinator:
            try:
                check_free(self.store, overwrite=self.options.overwrite)
            except StorageError as error:
                if not self.elsewhere:
                    raise
                self.unusable = error
            self.metadata = json_copy(self.options.metadata)
        self.metadata_digest = metadata_digest(self.options.metadata)
        rank = self.ranks.rank
        with paused_collector():
            flat = flatten(
                state(),
                rank=rank,
                everyone=self.ranks.all,
                allow_pickle=self.options.allow_pickle,
                tell_alive=self.ranks.tell_alive,
            )
            self.objects = flat.objects
            self.tensors = {n: local_tensor(n, value) for n, value in flat.tensors.items()}
            for tensor in self.tensors.values():
                tensor.check_rank(rank)
            ties = find_ties(self.tensors)
            specs = {name: tensor.spec(ties.get(name)) for name, tensor in self.tensors.items()}
            tree, shared, own = flat.tree, specs, PerRankPart({}, {})
            if flat.has_per_rank:
                tree, shared, own = split_per_rank(flat.tree, specs, flat.copies)
        values = Values(tree, self.digests_of(shared), flat.groups)
        if self.options.base is not None:
            self.base = open_base(self.options.base, self.store, storage_options)
        terms = {
            "checkpoint_id": self.store.url,
            "base": "" if self.base is None else self.base.url,
            "check_replicas": str(self.options.check_replicas),
            "elsewhere": " ".join(place.url for place in self.elsewhere),
        }
        return Description(specs=shared, values=values, own=own, terms=terms)

    def digests_of(self, specs: TensorSpecs) -> dict[str, str]:
        """Return the hashes of plain tensors, if there is anybody to compare them with."""
        digests: dict[str, str] = {}
        sampling = self.sampling()
        if len(self.ranks.all) > 1:
            for name, spec in specs.items():
                if spec.is_plain:
                    known = digests.get(spec.same_as or "")
                    digests[name] = known or next(self.tensors[name].digests(sampling))[1]
                    self.ranks.tell_alive()
        return digests

    def sampling(self) -> Sampling | None:
        """Return which bytes of large tensors are compared, other ones at every save; None: all."""
        if self.options.check_replicas is not None:
            return None
        return Sampling(fingerprint(self.store.url.encode(), self.ranks.call.to_bytes(8, "big")))

    def compare_copies(self) -> None:
        """Find copies that differ, of what nothing else vouches for and of replicas if asked."""
        shared = self.agreed.tensors
        joined = [tensor for tensor in shared if tensor.is_joined]
        compare_copies(self.ranks, joined, self.tensors, sampling=self.sampling())
        if self.options.check_replicas is not None:
            replicated = [t for t in shared if t.has_replicas and not t.is_joined]
            self.disagreements = compare_copies(
                self.ranks,
                replicated,
                self.tensors,
                must_agree=self.options.check_replicas == "error",
            )
            if self.disagreements and self.ranks.is_coordinator:
                logger.warning("%s: %s", self.store.url, "; ".join(self.disagreements))

    def read_base(self) -> None:
        """Read the manifest of the base once, for all ranks."""
        base = self.base
        if base is None:
            return
        where = f"{base.url}/{MANIFEST}"

        def read(_: Answers) -> bytes:
            text = read_manifest_bytes(base)
            # Found out here, before anything is written, and for all ranks.
            parsed.append(Manifest.from_bytes(text, where))
            refuse_if_going(base, parsed[0].save_id)
            return text

        parsed: list[Manifest] = []
        try:
            text = together(self.ranks, "save: read base", lambda: b"", read)
        except StorageError:
            if not self.elsewhere:
                raise
            return  # what cannot be read is not referred to
        self.lender = Lender(base, parsed[0] if parsed else Manifest.from_bytes(text, where))

    def own_chunks(self) -> Iterator[Chunk]:
        """Yield what this rank writes, in the order of the plan."""
        for tensor, box in self.agreed.chunks:
            part = self.tensors[tensor.name].part(box)
            yield Chunk(tensor=tensor, box=box, source=TensorSource(part))

    def stage(self, area: StagingArea, spread: Spreading = False) -> bytes:
        """Copy what this rank writes, so that the tensors may change.

        With ``spread`` what changes in steps of optimizers only is left to be copied before one.
        """
        with self.recorder.phase("stage") as phase:
            phase.num_bytes = self.copy_chunks(area, spread)
        return b""

    def copy_chunks(self, area: StagingArea, spread: Spreading) -> int:
        """Copy what has to be copied now, and return how many bytes that is."""
        tensors = [cast(TensorSource, chunk.source).tensor for chunk in self.chunks]
        staged = area.lay_out(self.chunks, tensors)
        self.chunks, self._image = staged.chunks, staged.image
        copies = staged.copies
        if spread:
            quiet = quiet_memory(spread, self.objects)
            restless: set[str] = self.ranks.memory.setdefault("restless", set())
            waiting = witnesses(copies, quiet, restless, thorough=spread == "checked")
            self.spread = Spread(list(waiting.values()), quiet.trained)
            self.spread.begin()
            copies = [copy for copy in copies if copy not in waiting]
        copy_all(copies, self.ranks.tell_alive)
        self.tensors, self.objects = {}, ()
        return sum(copy.source.nbytes for copy in copies)

    def await_copies(self, spread: Spread) -> None:
        """Wait until everything has been copied."""

        def on_wait() -> None:
            self.raise_if_cancelled()
            self.ranks.tell_alive()
            if self.ranks.is_called_off():
                raise CalledOff

        try:
            spread.wait(on_wait, self.options.timeout.total_seconds())
        finally:
            self.ranks.memory["restless"] |= spread.changed

    def finish(self) -> SaveReport:
        """Write this rank's file, and let the coordinator commit; elsewhere if the storage fails.

        Every rank learns of the same error, so that all go on at the same place, or none.
        """
        first: StorageError | None = None
        for place in (self.store, *self.elsewhere):
            if first is not None:
                logger.warning("%s; the save is made at %s instead", first, place.url)
                self.store, self.unusable = place, None
                self.lender, self.borrowed, self.written_bytes = None, Borrowed(), 0
            try:
                return self.write_and_commit()
            except StorageError as error:
                if first is not None:
                    first.add_note(f"and elsewhere: {error}")
                first = first or error
        raise first or CheckpointError("there is no place to save to")

    def write_and_commit(self) -> SaveReport:
        """Make the save at one place."""
        manifest: list[Manifest] = []
        costs: dict[int, Told] = {}

        def check(answers: Answers) -> bytes:
            told = {rank: json.loads(answer) for rank, answer in answers.items()}
            costs.update({rank: t["costs"] for rank, t in told.items()})
            self.warn_of_other_metadata({rank: t["metadata"] for rank, t in told.items()})
            reports = [report for report in told.values() if "file" in report]
            borrowed = [BorrowedFile.from_json(file) for r in reports for file in r["borrowed"]]
            made = Manifest(
                save_id=self.agreed.save_id,
                tensors={tensor.name: tensor for tensor in self.agreed.stored},
                tree=self.agreed.tree,
                files=tuple(FileRecord.from_json(report["file"]) for report in reports),
                borrowed=tuple({file.id: file for file in borrowed}.values()),
                metadata=self.metadata,
            )
            borrowed_bytes = sum(report["borrowed_bytes"] for report in reports)
            with self.recorder.phase("commit"):
                check_complete(self.store, made, borrowed_bytes)
            manifest.append(made)
            return b""

        def stop_if_cancelled() -> bytes:
            self.raise_if_cancelled()
            return b""

        def publish(_: Answers) -> bytes:
            with self.recorder.phase("commit"):
                commit(self.store, manifest[0], overwrite=self.options.overwrite)
            totals = {
                "num_tensors": len(self.agreed.stored),
                "total_bytes": sum(t.stored_bytes for t in self.agreed.stored),
                "bases": sorted({file.source for file in manifest[0].borrowed}),
                "costs": self.recorder.summarize(costs),
            }
            return json.dumps(totals).encode()

        def discard_own(_: CheckpointError) -> None:
            discard(self.store, self.agreed.save_id, self.ranks.rank)

        def discard_if_lost(error: CheckpointError) -> None:
            if error.is_certain:  # other failures to publish may have gone through
                discard_own(error)

        own: list[FileRecord] = []

        def write() -> bytes:
            record = self.write()
            report: dict[str, Any] = {
                "metadata": self.metadata_digest,
                "costs": self.recorder.entry(),
            }
            if record is not None:
                own.append(record)
                report["file"] = record.to_json()
                report["borrowed"] = [file.to_json() for file in self.borrowed.files.values()]
                report["borrowed_bytes"] = self.borrowed.num_bytes
            return json.dumps(report).encode()

        # Only a failure that the coordinator has told of: else it may be about to commit the file.
        together(self.ranks, "save: write", write, check, on_failure=discard_own)
        totals = json.loads(
            together(
                self.ranks, "save: commit", stop_if_cancelled, publish, on_failure=discard_if_lost
            )
        )
        bases = tuple(totals.pop("bases"))
        self.recorder.learn(totals.pop("costs"))
        report = SaveReport(
            url=self.store.url,
            save_id=self.agreed.save_id,
            written_bytes=sum(record.size for record in own),
            borrowed_bytes=self.borrowed.num_bytes,
            bases=bases,
            disagreements=self.disagreements,
            costs=self.recorder.costs(self.store.url),
            **totals,
        )
        self.log(report)
        return report

    def warn_of_other_metadata(self, digests: Mapping[int, str]) -> None:
        """Warn where ranks gave other metadata than the coordinator, whose is kept."""
        others = [r for r, digest in digests.items() if digest not in ("", self.metadata_digest)]
        if others:
            logger.warning(
                "%s: %s gave other metadata than rank %d, whose is kept; what differs from rank "
                "to rank belongs into the state, as PerRank",
                self.store.url,
                ranks_text(others),
                self.ranks.rank,
            )

    def log(self, report: SaveReport) -> None:
        """Log what this rank did for the save."""
        if not logger.isEnabledFor(logging.INFO):
            return
        stored = self.total_bytes - report.borrowed_bytes
        logger.info(
            "saved %s: rank %d wrote %d bytes in %.3f s; it holds %d, stores %d of them (dedup "
            "ratio %s) and finds %d in the base; %d tensors of %d bytes in all; %s",
            report.url,
            self.ranks.rank,
            report.written_bytes,
            report.costs.seconds,
            self.held_bytes,
            stored,
            f"{self.held_bytes / stored:.2f}" if stored else "infinite",
            report.borrowed_bytes,
            report.num_tensors,
            report.total_bytes,
            report.costs.line(),
        )

    def write(self) -> FileRecord | None:
        """Write this rank's data file."""

        def on_progress(num_bytes: int) -> None:
            self.written_bytes += num_bytes
            self.raise_if_cancelled()
            self.ranks.tell_alive()
            if self.ranks.is_called_off():
                raise CalledOff

        self.raise_if_cancelled()
        if self.spread is not None:
            with self.recorder.phase("copy") as phase:
                self.await_copies(self.spread)
                if not self.has_copied:  # once, wherever it is written to
                    phase.num_bytes, self.has_copied = self.spread.copied_bytes, True
        if self.unusable is not None:
            raise self.unusable
        with self.recorder.phase("write") as phase:
            record = self.write_changed(on_progress)
            phase.num_bytes = 0 if record is None else record.size
        return record

    def write_changed(self, on_progress: Progress) -> FileRecord | None:
        """Write what is not in the base, once everything has been copied."""
        chunks, image = self.chunks, self._image
        if self.lender is not None:
            chunks = self.changed_chunks(self.lender, on_progress)
            image = image if len(chunks) == len(self.chunks) else None
        return write_file(
            self.store,
            Contents(chunks, image, self.borrowed.references),
            save_id=self.agreed.save_id,
            rank=self.ranks.rank,
            on_progress=on_progress,
        )

    def changed_chunks(self, lender: Lender, on_progress: Progress) -> list[Chunk]:
        """Return what is not in the base as it is now; the rest is borrowed."""
        changed: list[Chunk] = []
        for chunk in self.chunks:
            if lender.borrow(chunk, self.borrowed):
                on_progress(chunk.box.numel * chunk.dtype.itemsize)
            else:
                changed.append(chunk)
        return changed

    def forget_state(self) -> None:
        """Let go of all that is large, and of the ranks, which keep the job, once it has ended."""
        if self.spread is not None:
            self.spread.abandon()
        self.chunks, self.tensors, self._image = [], {}, None
        self.ranks = self.recorder.ranks = Solo(self.ranks.rank)

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled once the save has been cancelled on this rank."""
        if self.cancelled.is_set():
            raise Cancelled(f"{self.store.url}: the save was cancelled")


def metadata_digest(metadata: Any) -> str:
    """Return what tells metadata apart from others; never raises."""
    if metadata is None:
        return ""
    try:
        return digest(json.dumps(metadata, sort_keys=True).encode()).hex()
    except Exception:
        return "no JSON"


def json_copy(metadata: Any) -> Any:
    """Return metadata as it is now; CheckpointError unless it is a JSON value."""
    try:
        check_nesting(metadata, MAX_JSON_NESTING, "metadata")
        return json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"metadata must be a JSON value (None, bool, number, str, list, dict): {error}"
        ) from error
