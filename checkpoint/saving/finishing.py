"""What comes of a plan: data files, what takes the place of lost ranks, and the commit."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dtckpt.logs import logger_of

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.layout import Layout
from ...storage.base import Store
from ..compression.choosing import Compress, Sample, note_speed, speed_of
from ..files.blocks import DEFAULT_BLOCK_BYTES, digest
from ..files.borrowing import Borrowed, Lender
from ..files.committing import check_complete, commit, refuse_if_other
from ..files.encoding import OnEncoded, num_encoders
from ..files.manifest import BorrowedFile, FileRecord, Manifest
from ..files.stored_tensor import StoredTensor
from ..files.writing import Chunk, Contents, Progress, write_file
from ..ranks.text import ranks_text
from ..timing.costs import Costs
from ..timing.recorder import Recorder, Told
from .agreeing import SAVE_ID_BYTES, Agreement
from .writers import stand_ins

logger = logger_of("checkpoint")

_NUM_SAMPLES = 8


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
    first_rank_buffers: tuple[str, ...] = ()
    """Buffers of this rank's state that were taken from the first rank of their group, as DDP takes
    them (see ``buffers_of_first_rank``)."""
    stood_in_for: tuple[int, ...] = ()
    """Ranks that died or fell silent during the save, and whose parts others have written."""
    costs: Costs = field(repr=False, compare=False)
    """Seconds and bytes of each phase, on this rank and over all."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is to be the data file of one rank."""

    rank: int
    chunks: list[Chunk]
    """In file order."""
    image: memoryview | None = None
    """Staging memory, in which they lie as in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.num_bytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Written:
    """A data file, and what it refers to instead of holding it."""

    record: FileRecord
    borrowed: Borrowed

    def to_json(self) -> dict[str, Any]:
        """Return what the coordinator has to know."""
        return {
            "file": self.record.to_json(),
            "borrowed": [file.to_json() for file in self.borrowed.files.values()],
            "borrowed_bytes": self.borrowed.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class Manner:
    """How data files are written."""

    save_id: str
    compress: Compress
    on_progress: Progress
    on_encoded: OnEncoded


def write_part(part: Part, store: Store, lender: Lender | None, manner: Manner) -> Written | None:
    """Write what a base does not have; None where there is nothing to write nor to refer to."""
    borrowed = Borrowed()
    chunks, image = part.chunks, part.image
    if lender is not None:
        chunks = _changed(part.chunks, lender, borrowed, manner.on_progress)
        image = image if len(chunks) == len(part.chunks) else None
    contents = Contents(chunks, image, borrowed.references)
    is_compressed = _is_compressed(chunks, store, manner.compress)
    began = time.perf_counter()
    record = write_file(
        store,
        contents,
        save_id=manner.save_id,
        rank=part.rank,
        on_progress=manner.on_progress,
        is_compressed=is_compressed,
        on_encoded=manner.on_encoded,
    )
    if record is None:
        return None
    if not is_compressed:
        note_speed(store.url, record.size, time.perf_counter() - began)
    return Written(record, borrowed)


def _is_compressed(chunks: Sequence[Chunk], store: Store, compress: Compress) -> bool:
    """Whether a file of these chunks is to be compressed."""
    if compress != "auto":
        return compress == "zstd"
    speed = speed_of(store.url)
    return speed is not None and Sample.of(_sample(chunks)).pays(speed, num_encoders())


def _sample(chunks: Sequence[Chunk]) -> Iterator[tuple[memoryview, int]]:
    """Yield the first block of a few chunks, of which the bytes before each are about as many."""
    total = sum(chunk.num_bytes for chunk in chunks)
    passed = taken = 0
    for chunk in chunks:
        passed += chunk.num_bytes
        if passed * _NUM_SAMPLES > taken * total:
            taken = -(-passed * _NUM_SAMPLES // total)
            for piece in islice(chunk.source.pieces(DEFAULT_BLOCK_BYTES), 1):
                yield piece, chunk.dtype.in_file.itemsize


def _changed(
    chunks: Iterable[Chunk], lender: Lender, borrowed: Borrowed, on_progress: Progress
) -> list[Chunk]:
    """Return what is not in the base as it is now; the rest is borrowed."""
    changed: list[Chunk] = []
    for chunk in chunks:
        if lender.borrow(chunk, borrowed):
            on_progress(chunk.num_bytes)
        else:
            changed.append(chunk)
    return changed


@dataclass(frozen=True, slots=True)
class Replacement:
    """How a save goes on without ranks that are lost, or why it cannot."""

    save_id: str = ""
    """Another one, since a rank that was taken for dead may still write to its file."""
    by: Mapping[int, int] = field(default_factory=dict[int, int])
    """Who writes the parts of the lost ranks that had anything to write."""
    problem: str = ""

    @property
    def text(self) -> str:
        """Who does what, for a message."""
        parts = [f"rank {other} writes the part of rank {rank}" for rank, other in self.by.items()]
        return ", ".join(["all that are left write again", *parts])

    def to_bytes(self) -> bytes:
        """Return JSON."""
        return json.dumps([self.save_id, list(self.by.items()), self.problem]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Replacement:
        """Return what ``to_bytes`` was given."""
        save_id, by, problem = json.loads(data)
        return cls(save_id, dict(by), problem)


def replace_ranks(lost: Collection[int], agreed: Agreement, num_copies: int | None) -> Replacement:
    """Return who writes the parts of lost ranks; on the coordinator, who knows all tensors.

    ``num_copies`` is on how many ranks each part was staged; None where tensors are as they were.
    """
    most = None if num_copies is None else num_copies - 1
    by: dict[int, int] = {}
    for rank in lost:
        chunks = [(t, box) for t in agreed.stored for box in t.chunks_of(rank)]
        if not chunks:
            continue
        able = stand_ins(rank, agreed.shared)
        living = [other for other in able[:most] if other not in lost]
        if (alone := _held_alone(chunks)) or not living:
            return Replacement(problem=_why(rank, alone, able, most))
        by[rank] = living[0]
    return Replacement(secrets.token_hex(SAVE_ID_BYTES), by)


def _held_alone(chunks: Sequence[tuple[StoredTensor, Box]]) -> list[str]:
    """Return the chunks that no other rank holds."""
    return [
        f"{tensor.name!r} {box}"
        for tensor, box in chunks
        if isinstance(tensor.layout, Layout) and tensor.layout.num_replicas == 1
    ]


def _why(rank: int, alone: Sequence[str], able: Sequence[int], most: int | None) -> str:
    """Say why nobody can write the part of a lost rank."""
    begin = f"No other rank can write the part of rank {rank}: "
    if alone:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        return f"{begin}it alone held {alone[0]}{more}"
    if not able:
        return f"{begin}none holds the same cells of all tensors"
    if most == 0:
        return (
            f"{begin}{ranks_text(able)} held the same, but may have changed it since the call; "
            "with staged_copies=2 another rank copies it, too"
        )
    return f"{begin}{ranks_text(able[:most])}, who might have, died or fell silent, too"


@dataclass(slots=True, eq=False, kw_only=True)
class Commit:
    """On the coordinator, the commit of what all ranks have written to one place."""

    store: Store
    agreed: Agreement
    recorder: Recorder
    metadata: Any
    metadata_digest: str
    overwrite: bool
    replaced: str | None
    """Save id of the checkpoint that was there at the call."""
    is_alone: bool
    """Whether ranks are lost; the job may have gone on elsewhere then, and have saved again."""
    _manifest: Manifest = field(init=False)
    _costs: dict[int, Told] = field(init=False)

    def check(self, answers: Mapping[int, bytes]) -> bytes:
        """Prove that the files are complete, of which ranks tell."""
        told = {rank: json.loads(answer) for rank, answer in answers.items()}
        self._costs = {rank: t["costs"] for rank, t in told.items()}
        self._warn_of_other_metadata({rank: t["metadata"] for rank, t in told.items()})
        reports = [report for t in told.values() for report in t["files"]]
        borrowed = [BorrowedFile.from_json(file) for r in reports for file in r["borrowed"]]
        self._manifest = Manifest(
            save_id=self.agreed.save_id,
            tensors={tensor.name: tensor for tensor in self.agreed.stored},
            tree=self.agreed.tree,
            files=tuple(FileRecord.from_json(report["file"]) for report in reports),
            borrowed=tuple({file.id: file for file in borrowed}.values()),
            metadata=self.metadata,
        )
        borrowed_bytes = sum(report["borrowed_bytes"] for report in reports)
        with self.recorder.phase("commit"):
            check_complete(self.store, self._manifest, borrowed_bytes)
        return b""

    def publish(self, _: Mapping[int, bytes]) -> bytes:
        """Publish the manifest, and return what all ranks are told of the whole."""
        with self.recorder.phase("commit"):
            if self.is_alone:
                refuse_if_other(self.store, self.replaced)
            commit(self.store, self._manifest, overwrite=self.overwrite)
        totals = {
            "num_tensors": len(self.agreed.stored),
            "total_bytes": sum(t.stored_bytes for t in self.agreed.stored),
            "bases": sorted({file.source for file in self._manifest.borrowed}),
            "costs": self.recorder.summarize(self._costs),
        }
        return json.dumps(totals).encode()

    def _warn_of_other_metadata(self, digests: Mapping[int, str]) -> None:
        """Warn where ranks gave other metadata than the coordinator, whose is kept."""
        others = [r for r, digest in digests.items() if digest not in ("", self.metadata_digest)]
        if others:
            logger.warning(
                "%s: %s gave other metadata than rank %d, whose is kept; what differs from rank "
                "to rank belongs into the state, as PerRank",
                self.store.url,
                ranks_text(others),
                self.recorder.ranks.rank,
            )


def log_report(report: SaveReport, rank: int, held_bytes: int, total_bytes: int) -> None:
    """Log what a rank did for a save: of so many bytes that it holds it stores so many."""
    if not logger.isEnabledFor(logging.INFO):
        return
    stored = total_bytes - report.borrowed_bytes
    logger.info(
        "saved %s: rank %d wrote %d bytes in %.3f s; it holds %d, stores %d of them (dedup "
        "ratio %s) and finds %d in the base; %d tensors of %d bytes in all; %s",
        report.url,
        rank,
        report.written_bytes,
        report.costs.seconds,
        held_bytes,
        stored,
        f"{held_bytes / stored:.2f}" if stored else "infinite",
        report.borrowed_bytes,
        report.num_tensors,
        report.total_bytes,
        report.costs.line(),
    )


def metadata_digest(metadata: Any) -> str:
    """Return what tells metadata apart from others; never raises."""
    if metadata is None:
        return ""
    try:
        return digest(json.dumps(metadata, sort_keys=True).encode()).hex()
    except Exception:
        return "no JSON"
