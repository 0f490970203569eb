"""Plans of saves and loads at any scale, made as each rank would make them, without the ranks."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dtckpt.checkpoint.files.blocks import DEFAULT_BLOCK_BYTES, digest
from dtckpt.checkpoint.files.datafile import lay_out
from dtckpt.checkpoint.files.manifest import FileRecord, Manifest
from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.ranks.frames import message
from dtckpt.checkpoint.ranks.relay import children_of, is_relayed
from dtckpt.checkpoint.reading import limits
from dtckpt.checkpoint.reading.cuts import Geometry
from dtckpt.checkpoint.saving.merging import SpecReport, merge_tensors, merge_values
from dtckpt.checkpoint.saving.outlines import Outline, Speakers, Told
from dtckpt.checkpoint.saving.writers import assign_writers
from dtckpt.checkpoint.state.values import Node
from dtckpt.checkpoint.tensors.spec import TensorSpecs, Values
from dtckpt.dtensor import Layout

from .jobs import Job

T = TypeVar("T")

_SAVE_ID = "0123456789abcdef"
_PARTS = ("header", "blocks")
"""Of a data file, what has a digest in the manifest; digests do not shrink when they are packed."""
_OFFER_BYTES = 200
"""What a rank is told of another one which hands on to it."""
_SAVING_SAMPLE = 64
_LOADING_SAMPLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What planning costs at one number of ranks."""

    job: str
    loaded_by: str
    ranks: int
    tensors: int
    plan_seconds: float
    """All that one rank does before it writes: specs, fingerprint, writers, its own file."""
    cached_seconds: float
    """The same where the plan is remembered from the save before: specs and fingerprint."""
    coordinator_seconds: float
    """What the coordinator does besides: answers and file records of all ranks, the manifest."""
    coordinator_bytes: int
    """Most memory that the coordinator's plan and manifest take."""
    told_bytes: int
    """What all ranks are told of others before they plan, packed."""
    sent_bytes: int
    """Most that one rank sends so that all have the manifest."""
    manifest_bytes: int
    busiest: float
    """Bytes written by the busiest rank looked at over the mean of all ranks."""
    forced: float
    """What ``busiest`` is at least, since the layouts leave unequal parts to ranks."""
    load_seconds: float
    """What one rank does before it reads: parse the manifest, find its chunks; the slowest."""
    load_files: int
    """Most files that one rank looked at reads from."""
    load_ranges: int
    """Most byte ranges that one rank looked at reads, before neighbours are merged."""


def simulate(saving: Job, loading: Job) -> Scale:
    """Plan a save by one job and a load of it by another one."""
    outlines = {rank: told for stage in saving.stages for rank, told in stage.outlines()}
    answers = _answers(outlines)
    talk = _talk(outlines)
    # The rank whose stage has most to describe; all ranks of it do the same work.
    rank = max(outlines, key=lambda rank: len(outlines[rank].form))
    plan_seconds, stored = _timed(lambda: _plan(saving, talk, rank))
    cached_seconds, _ = _timed(lambda: Outline.of(saving.describe(rank)).prints())
    coordinator_seconds, manifest = _timed(lambda: _coordinate(saving, stored, answers))
    tracemalloc.start()
    _coordinate(saving, _plan(saving, talk, rank), answers)
    coordinator_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    busiest, forced = _balance(saving, stored)
    parse_seconds, parsed = _timed(lambda: Manifest.from_bytes(manifest, "simulated"))
    loads = [
        _timed(lambda r=r: _touched(parsed, loading, r)) for r in _sample(loading, _LOADING_SAMPLE)
    ]
    return Scale(
        job=saving.name,
        loaded_by=f"{loading.name} on {loading.num_ranks:,}",
        ranks=saving.num_ranks,
        tensors=len(stored),
        plan_seconds=plan_seconds,
        cached_seconds=cached_seconds,
        coordinator_seconds=coordinator_seconds,
        coordinator_bytes=coordinator_bytes,
        told_bytes=0 if talk is None else len(message(0, talk.speakers) + message(0, talk.told)),
        sent_bytes=_sent(manifest, saving.num_ranks),
        manifest_bytes=len(manifest),
        busiest=busiest,
        forced=forced,
        load_seconds=parse_seconds + max(seconds for seconds, _ in loads),
        load_files=max(files for _, (files, _) in loads),
        load_ranges=max(ranges for _, (_, ranges) in loads),
    )


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the time of the processor, since nothing here waits, and the result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


@dataclass(frozen=True, slots=True)
class _Talk:
    """What the coordinator sends to all where ranks differ."""

    speakers: bytes
    told: bytes


def _talk(outlines: Mapping[int, Outline]) -> _Talk | None:
    """Return what is said before a plan; None where all ranks have the same."""
    prints = {rank: outline.prints() for rank, outline in outlines.items()}
    if len(set(prints.values())) == 1:
        return None
    speakers = Speakers.of(prints)
    told = Told.joined(speakers.told_by(rank, outline) for rank, outline in outlines.items())
    return _Talk(json.dumps(speakers.to_json()).encode(), json.dumps(told.to_json()).encode())


def _plan(job: Job, talk: _Talk | None, rank: int) -> tuple[StoredTensor, ...]:
    """Do what one rank does before it writes, given what the others say."""
    own = job.describe(rank)
    outline = Outline.of(own)
    outline.prints()
    if talk is None:
        reports = [SpecReport.of(tuple(range(job.num_ranks)), own)]
    else:
        speakers = Speakers.from_json(json.loads(talk.speakers))
        speakers.told_by(rank, outline)
        reports = speakers.reports(Told.from_json(json.loads(talk.told)))
    stored = assign_writers(merge_tensors(reports))
    chunks = [(tensor, box) for tensor in stored for box in tensor.chunks_of(rank)]
    lay_out(((t.key(box), t.dtype, box.sizes) for t, box in chunks), save_id=_SAVE_ID)
    return stored


def _sent(decision: bytes, num_ranks: int) -> int:
    """Return the bytes that the rank which sends most sends of a decision.

    That is the coordinator, which also tells most of the others who hands it on to them.
    """
    frame = len(message(0, decision))
    if not is_relayed(frame, num_ranks - 1):
        return frame * (num_ranks - 1)
    direct = len(children_of(0, num_ranks))
    return frame * direct + _OFFER_BYTES * (num_ranks - 1 - direct)


def _answers(outlines: Mapping[int, Outline]) -> dict[int, tuple[bytes, bytes]]:
    """Return what every rank sends to the coordinator: its fingerprints, its file's record."""
    record = FileRecord(
        rank=0,
        size=123_456_789_012,
        header_bytes=491_520,
        data_bytes=123_456_297_492,
        header_digest="",
        table_digest="",
    ).to_json()
    found: dict[int, tuple[bytes, bytes]] = {}
    for rank, outline in outlines.items():
        own = {part: digest(b"%s %d" % (part.encode(), rank)).hex() for part in _PARTS}
        found[rank] = outline.prints(), json.dumps(record | own | {"rank": rank}).encode()
    return found


def _coordinate(
    job: Job, stored: tuple[StoredTensor, ...], answers: Mapping[int, tuple[bytes, bytes]]
) -> bytes:
    """Do what the coordinator does besides planning, and return the manifest."""
    Speakers.of({rank: prints for rank, (prints, _) in answers.items()})
    stages = [
        (tuple(stage.ranks), Values(_tree(stage.describe(stage.ranks[0])), {}))
        for stage in job.stages
    ]
    manifest = Manifest(
        save_id=_SAVE_ID,
        created="2026-01-01T00:00:00+00:00",
        tensors={tensor.name: tensor for tensor in stored},
        tree=merge_values(stages),
        files=tuple(FileRecord.from_json(json.loads(record)) for _, record in answers.values()),
    )
    return manifest.to_bytes()


def _tree(specs: TensorSpecs) -> Node:
    """Return the tree of a state dict of parts, each a dict of tensors."""
    parts: dict[str, dict[str, Node]] = {}
    for name in specs:
        part, _, key = name.partition("/")
        parts.setdefault(part, {})[key] = {"tensor": name}
    return {"dict": {part: {"dict": leaves} for part, leaves in parts.items()}}


def _balance(job: Job, stored: tuple[StoredTensor, ...]) -> tuple[float, float]:
    """Return bytes written by the busiest rank over the mean, and what that is at least."""
    mean = sum(tensor.num_bytes for tensor in stored) / job.num_ranks
    written: list[int] = []
    shares: list[float] = []
    for rank in _sample(job, _SAVING_SAMPLE):
        parts = ((t, box.numel * t.dtype.itemsize) for t in stored for box in t.chunks_of(rank))
        written.append(sum(num_bytes for _, num_bytes in parts))
        shares.append(sum(_share(tensor, rank) for tensor in stored))
    return max(written) / mean, max(max(shares) / mean, 1.0)


def _share(tensor: StoredTensor, rank: int) -> float:
    """Return the bytes of a rank's part, divided by the number of ranks that hold it."""
    layout = tensor.layout
    coordinate = layout.mesh.coordinate(rank) if isinstance(layout, Layout) else None
    if not isinstance(layout, Layout) or coordinate is None:
        return 0.0
    return layout.box(coordinate).numel * tensor.dtype.itemsize / layout.num_replicas


def _touched(manifest: Manifest, job: Job, rank: int) -> tuple[int, int]:
    """Return how many files and byte ranges a rank of a loading job reads."""
    files: set[int] = set()
    ranges = 0
    for name, spec in job.describe(rank).items():
        layout = spec.layout
        coordinate = layout.mesh.coordinate(rank) if layout is not None else None
        if layout is None or coordinate is None:
            continue
        wanted = layout.box(coordinate)
        for writer, chunk, _ in manifest.tensors[name].chunks_meeting(wanted):
            files.add(writer)
            geometry = Geometry(
                chunk=chunk,
                wanted=wanted,
                itemsize=spec.dtype.itemsize,
                block_bytes=DEFAULT_BLOCK_BYTES,
                staged_bytes=limits.READ_BYTES,
            )
            ranges += sum(1 for _ in geometry.cuts(runs=True))
    return len(files), ranges


def _sample(job: Job, number: int) -> list[int]:
    """Return ranks spread evenly, the first of every replica and stage among them."""
    return sorted({*range(0, job.num_ranks, max(job.num_ranks // number, 1)), job.num_ranks - 1})
