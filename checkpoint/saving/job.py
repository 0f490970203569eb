"""One save on one rank, phase by phase, each run together with all others."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

from dtckpt.errors import (
    Cancelled,
    CheckpointError,
    LayoutMismatch,
    RankFailed,
    StorageError,
)
from dtckpt.logs import logger_of

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ...storage.open import open_store
from ..compression.choosing import Compress, check_compress
from ..files.borrowing import Lender, open_base, refuse_if_going
from ..files.committing import check_free, discard
from ..files.manifest import MANIFEST, Manifest, read_manifest_bytes
from ..files.stored_tensor import StoredTensor
from ..files.writing import Chunk, in_file_order
from ..optimizers.own_entries import entries_that_differ
from ..ranks.failing import CalledOff
from ..ranks.together import DEFAULT_TIMEOUT, Answers, Ranks, Solo, together
from ..staging.area import StagingArea, copy_all
from ..staging.quiet import Spreading, quiet_memory
from ..staging.spread import Spread
from ..staging.witness import witnesses
from ..state.collector import paused_collector
from ..state.limits import json_copy
from ..state.tree import GiveState
from ..tensors.gathered import refuse_to_save_gathered
from ..tensors.local_tensor import LocalTensor, local_tensor
from ..tensors.sampling import Sampling
from ..tensors.spec import PerRankPart, Values, fingerprint, split_per_rank
from ..tensors.ties import find_ties
from ..tensors.transfer import TensorSource
from ..timing.recorder import Recorder
from .agreeing import MERGE_PHASE, Agreement, Description, PlanMemory, agree
from .copies import compare_copies, digests_of_plain
from .finishing import (
    Commit,
    Manner,
    Part,
    Replacement,
    SaveReport,
    Written,
    log_report,
    metadata_digest,
    replace_ranks,
    write_part,
)
from .first_rank_buffers import with_first_rank_buffers
from .flattening import flatten, with_plain_nodes
from .writers import stood_in_for

logger = logger_of("checkpoint")

CheckReplicas = Literal["error", "warn"] | None


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
    compress: Compress = None
    timeout: timedelta = DEFAULT_TIMEOUT
    staged_copies: int = 1
    """On how many ranks that hold it each part is staged, by a save in the background."""


class SaveJob:
    """One save on one rank: ``plan``, perhaps ``stage``, then ``finish``."""

    store: Store
    base: Store | None = None
    agreed: Agreement
    tensors: dict[str, LocalTensor]
    objects: tuple[Any, ...]
    """Modules, optimizers and others whose state dicts the state has."""
    metadata_digest: str
    """Of what the user gave on this rank; empty if that is nothing."""

    def __init__(self, ranks: Ranks, options: SaveOptions) -> None:
        self.ranks: Ranks = ranks
        self.options = options
        self.cancelled = threading.Event()
        self.disagreements: tuple[str, ...] = ()
        self.first_rank_buffers: tuple[str, ...] = ()
        self.lender: Lender | None = None
        self.parts: dict[int, Part] = {}
        """What this rank writes, and by rank what it may have to write for others."""
        self.writes = [ranks.rank]
        """Whose parts this rank writes."""
        self.lost: set[int] = set()
        """Who is lost, and not waited for any more."""
        self.is_staged = False
        self.not_staged: BaseException | None = None
        """Why this rank could not copy what it writes."""
        self.elsewhere: tuple[Store, ...] = ()
        """Where to write what the store does not take."""
        self.unusable: StorageError | None = None
        """What is known to be wrong with the store before anything is written, on one rank."""
        self.replaced: str | None = None
        """Save id of the checkpoint that was there at the call; on the coordinator."""
        self.written_bytes = 0
        self.total_bytes = 0
        self.held_bytes = 0
        """Bytes of tensors that this rank holds; known only if it is logged."""
        self.spread: Spread | None = None
        """Copies that are made while the training goes on."""
        self.recorder = Recorder("save", ranks)
        self.has_copied = False
        self.entries: Mapping[str, tuple[Any, Mapping[Any, Any] | None]] = {}
        """Distributed parameters of optimizers with their state, by its name, until all agree."""
        self.own_entries: set[str] = set()
        """Names of those that ranks have otherwise, and that are stored for each part."""
        self.metadata: Any = None
        """What the user gave, as it was at the call; on the coordinator."""

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
        try:
            self.agreed = agree(self.ranks, memory, "save: plan", describe)
        except LayoutMismatch as error:
            # All ranks have the same error, of the same phase. What failed before the states were
            # merged, such as other arguments, is no difference of states.
            if error.phase != MERGE_PHASE:
                raise
            self.own_entries = entries_that_differ(self.ranks, self.entries)
            if not self.own_entries:
                raise
            again = partial(self.describe, state, target)
            self.agreed = agree(self.ranks, memory, "save: plan", again)
        self.entries = {}
        self.compare_copies()
        self.read_base()
        with paused_collector():
            own = Part(self.ranks.rank, in_file_order(self.own_chunks()))
        self.parts, self.total_bytes = {own.rank: own}, own.num_bytes
        if logger.isEnabledFor(logging.INFO):
            self.held_bytes = sum(
                part.nbytes for tensor in self.tensors.values() for _, part in tensor.parts
            )

    def describe(self, state: GiveState, target: str | os.PathLike[str] | Store) -> Description:
        """Flatten the state and return what this rank says of it."""
        storage_options = self.options.storage_options
        if self.options.staged_copies < 1:
            raise ValueError(f"staged_copies is 1 or more, got {self.options.staged_copies}")
        check_compress(self.options.compress)
        self.store = open_store(target, **storage_options)
        self.elsewhere = tuple(open_store(place) for place in self.options.elsewhere)
        if self.ranks.is_coordinator:
            try:
                self.replaced = check_free(self.store, overwrite=self.options.overwrite)
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
                own_entries=self.own_entries,
            )
            self.objects, self.entries = flat.objects, flat.entries
            self.tensors = {n: local_tensor(n, value) for n, value in flat.tensors.items()}
            refuse_to_save_gathered(self.tensors)
            if len(self.ranks.all) > 1:
                self.tensors, self.first_rank_buffers = with_first_rank_buffers(
                    self.tensors, flat.objects, rank, self.ranks.all
                )
            for tensor in self.tensors.values():
                tensor.check_rank(rank)
            ties = find_ties(self.tensors)
            specs = {name: tensor.spec(ties.get(name)) for name, tensor in self.tensors.items()}
            tree, shared, own = flat.tree, specs, PerRankPart({}, {})
            if flat.has_per_rank:
                tree, shared, own = split_per_rank(flat.tree, specs, flat.copies)
        digests = digests_of_plain(self.ranks, shared, self.tensors, self.sampling())
        values = Values(tree, digests, flat.groups)
        if self.options.base is not None:
            self.base = open_base(self.options.base, self.store, storage_options)
        terms = {
            "checkpoint_id": self.store.url,
            "base": "" if self.base is None else self.base.url,
            "check_replicas": str(self.options.check_replicas),
            "elsewhere": " ".join(place.url for place in self.elsewhere),
            "staged_copies": str(self.options.staged_copies),
            "compress": str(self.options.compress),
        }
        return Description(
            specs=shared,
            values=values,
            own=own,
            terms=terms,
            expand=partial(with_plain_nodes, tensors=flat.tensors),
        )

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
        return self.chunks_from_tensors(self.agreed.chunks)

    def chunks_from_tensors(self, chunks: Iterable[tuple[StoredTensor, Box]]) -> Iterator[Chunk]:
        """Yield chunks of what this rank holds."""
        for tensor, box in chunks:
            part = self.tensors[tensor.name].part(box)
            yield Chunk(tensor=tensor, box=box, source=TensorSource(part))

    def part_of(self, rank: int) -> Part:
        """Return what another rank writes, all of which this rank holds, too."""
        chunks = ((t, box) for t in self.agreed.shared for box in t.chunks_of(rank))
        with paused_collector():
            return Part(rank, in_file_order(self.chunks_from_tensors(chunks)))

    def stage(self, area: StagingArea, spread: Spreading = False) -> None:
        """Copy what this rank writes, so that the tensors may change.

        With ``spread`` what changes in steps of optimizers only is left to be copied before one.
        No rank waits for the copies of others, whose failures all learn of as they write.
        """
        self.ranks.begin("save: stage")
        try:
            with self.recorder.phase("stage") as phase:
                phase.num_bytes = self.copy_chunks(area, spread)
        except BaseException as error:
            self.not_staged = error
            if self.spread is not None:
                self.spread.abandon()
            if not isinstance(error, Exception):
                self.finish()  # tells the others at once, and raises it here

    def copy_chunks(self, area: StagingArea, spread: Spreading) -> int:
        """Copy what has to be copied now, and return how many bytes that is."""
        rank = self.ranks.rank
        for other in stood_in_for(rank, self.agreed.shared, self.options.staged_copies - 1):
            self.parts[other] = self.part_of(other)
        sources = [
            [(chunk, cast(TensorSource, chunk.source).tensor) for chunk in part.chunks]
            for part in self.parts.values()
        ]
        staged = dict(zip(self.parts, area.lay_out(sources), strict=True))
        self.parts = {r: Part(r, found.chunks, found.image) for r, found in staged.items()}
        self.is_staged = True
        copies = [copy for found in staged.values() for copy in found.copies]
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
                self.store, self.unusable, self.replaced = place, None, None
                self.lender, self.written_bytes = None, 0
            try:
                return self.finish_here()
            except StorageError as error:
                if first is not None:
                    first.add_note(f"and elsewhere: {error}")
                first = first or error
        raise first or CheckpointError("there is no place to save to")

    def finish_here(self) -> SaveReport:
        """Make the save at one place, if need be without ranks that are lost meanwhile."""
        loss: RankFailed | None = None
        while True:
            try:
                if loss is not None:
                    self.replace_lost(loss)
                return self.write_and_commit()
            except RankFailed as error:
                if set(error.lost) <= self.lost or self.ranks.rank in error.lost:
                    raise
                self.lost |= set(error.lost)
                loss = error.with_traceback(None)  # whose frames hold it, and all tensors

    def replace_lost(self, loss: RankFailed) -> None:
        """Agree on who writes the parts of the ranks that are lost; raise if nobody can.

        All is written again under another save id: who is taken for dead may only be slow.
        """
        num_copies = self.options.staged_copies if self.is_staged else None

        def choose(_: Answers) -> bytes:
            return replace_ranks(self.lost, self.agreed, num_copies).to_bytes()

        without = frozenset(self.lost)
        told = together(
            self.ranks, "save: replace ranks", self.stop_if_cancelled, choose, without=without
        )
        chosen = Replacement.from_bytes(told)
        if chosen.problem:
            raise RankFailed(f"{loss}. {chosen.problem}") from loss
        if self.ranks.is_coordinator:
            logger.warning("%s: %s; %s", self.store.url, loss, chosen.text)
        self.agreed = replace(self.agreed, save_id=chosen.save_id)
        self.written_bytes = 0
        self.writes = [self.ranks.rank]
        self.writes += [rank for rank, other in chosen.by.items() if other == self.ranks.rank]
        for rank in self.writes:
            if rank not in self.parts:
                self.parts[rank] = self.part_of(rank)
        self.total_bytes = sum(self.parts[rank].num_bytes for rank in self.writes)

    def write_and_commit(self) -> SaveReport:
        """Make the save at one place."""
        without = frozenset(self.lost)
        written: list[Written] = []

        def write() -> bytes:
            written.extend(self.write())
            report = {
                "metadata": self.metadata_digest,
                "costs": self.recorder.entry(),
                "files": [file.to_json() for file in written],
            }
            return json.dumps(report).encode()

        def discard_own(_: CheckpointError) -> None:
            for rank in self.writes:
                discard(self.store, self.agreed.save_id, rank)

        def discard_if_lost(error: CheckpointError) -> None:
            if error.is_certain:  # other failures to publish may have gone through
                discard_own(error)

        commit = Commit(
            store=self.store,
            agreed=self.agreed,
            recorder=self.recorder,
            metadata=self.metadata,
            metadata_digest=self.metadata_digest,
            overwrite=self.options.overwrite,
            replaced=self.replaced,
            is_alone=bool(self.lost),
        )
        # Only a failure that the coordinator has told of: else it may be about to commit the file.
        together(
            self.ranks, "save: write", write, commit.check, on_failure=discard_own, without=without
        )
        told = together(
            self.ranks,
            "save: commit",
            self.stop_if_cancelled,
            commit.publish,
            on_failure=discard_if_lost,
            without=without,
        )
        totals = json.loads(told)
        bases = tuple(totals.pop("bases"))
        self.recorder.learn(totals.pop("costs"))
        report = SaveReport(
            url=self.store.url,
            save_id=self.agreed.save_id,
            written_bytes=sum(file.record.size for file in written),
            borrowed_bytes=sum(file.borrowed.num_bytes for file in written),
            bases=bases,
            disagreements=self.disagreements,
            first_rank_buffers=self.first_rank_buffers,
            stood_in_for=tuple(sorted(self.lost)),
            costs=self.recorder.costs(self.store.url),
            **totals,
        )
        log_report(report, self.ranks.rank, self.held_bytes, self.total_bytes)
        return report

    def write(self) -> Iterator[Written]:
        """Write the data files that fall to this rank: its own, and those of lost ranks."""
        self.raise_if_cancelled()
        if self.not_staged is not None:
            raise self.not_staged
        if self.spread is not None:
            with self.recorder.phase("copy") as phase:
                self.await_copies(self.spread)
                if not self.has_copied:  # once, wherever it is written to
                    phase.num_bytes, self.has_copied = self.spread.copied_bytes, True
        if self.unusable is not None:
            raise self.unusable
        for rank in self.writes:
            with self.recorder.phase("write") as phase:
                written = self.write_part(self.parts[rank])
                phase.num_bytes = 0 if written is None else written.record.size
            if written is not None:
                yield written

    def write_part(self, part: Part) -> Written | None:
        """Write what is not in the base, once everything has been copied."""

        def on_progress(num_bytes: int) -> None:
            self.written_bytes += num_bytes
            self.raise_if_cancelled()
            self.ranks.tell_alive()
            if self.ranks.is_called_off():
                raise CalledOff

        def on_encoded(seconds: float, num_bytes: int) -> None:
            self.recorder.part("compress", seconds, num_bytes)

        manner = Manner(self.agreed.save_id, self.options.compress, on_progress, on_encoded)
        return write_part(part, self.store, self.lender, manner)

    def forget_state(self) -> None:
        """Let go of all that is large, and of the ranks, which keep the job, once it has ended."""
        if self.spread is not None:
            self.spread.abandon()
        self.parts, self.tensors, self.not_staged = {}, {}, None
        self.ranks = self.recorder.ranks = Solo(self.ranks.rank)

    def stop_if_cancelled(self) -> bytes:
        """Answer a phase in which a rank has nothing to do."""
        self.raise_if_cancelled()
        return b""

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled once the save has been cancelled on this rank."""
        if self.cancelled.is_set():
            raise Cancelled(f"{self.store.url}: the save was cancelled")
