"""Offline resharding: rewrite a checkpoint for another mesh, without ranks and in bounded memory.

It is the same algorithm as everywhere: the boxes of the new layout are intersected with those of
the old one, and exactly those bytes are streamed from file to file, verified as they are read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dtensor.geometry.box import Box
from ..dtensor.geometry.mesh import Mesh
from ..storage.base import Store
from ..storage.open import open_store
from .files.committing import check_complete, check_free, commit, discard
from .files.manifest import FileRecord, Manifest
from .files.stored_data import StoredData
from .files.stored_tensor import StoredTensor
from .files.writing import Chunk, Contents, write_file
from .formats.opening import open_place, read_manifest, stored_data
from .placing import Rule, place
from .reading.execution import execute
from .reading.read_plan import plan_reads
from .reading.wants import Array, ArraySink, Want
from .saving.writers import assign_writers
from .tensors.source import PIECE_BYTES
from .tensors.spec import GlobalTensor


def reshard(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    mesh: Mesh,
    rules: Sequence[Rule],
    *,
    overwrite: bool = False,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write ``source`` anew at ``target`` as if it had been saved from ``mesh``.

    ``rules`` place the tensors as ``place`` says. Memory is bounded whatever the size;
    ``on_progress(done, total)`` is called with bytes written. The target is committed at the end or
    not at all. Errors are those of ``load`` and ``save``.
    """
    old = open_place(source, **dict(source_options or {}))
    new = open_store(target, **dict(target_options or {}))
    manifest = read_manifest(old)
    check_free(new, overwrite=overwrite)
    tensors = assign_writers(
        GlobalTensor(
            name=p.tensor.name, dtype=p.tensor.dtype, shape=p.tensor.shape, layout=p.layout
        )
        for p in place(manifest, mesh, rules)
    )
    job = _Reshard(stored_data(old, manifest), new, on_progress, sum(t.num_bytes for t in tensors))
    files = job.write_all(tensors)
    made = Manifest(
        save_id=job.save_id,
        tensors={tensor.name: tensor for tensor in tensors},
        tree=manifest.tree,
        files=tuple(files),
        metadata=manifest.metadata,
    )
    check_complete(new, made)
    commit(new, made, overwrite=overwrite)
    return made


@dataclass(slots=True)
class _Reshard:
    data: StoredData
    target: Store
    on_progress: Callable[[int, int], None] | None
    total: int
    done: int = 0
    save_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def write_all(self, tensors: Sequence[StoredTensor]) -> list[FileRecord]:
        ranks = sorted({rank for tensor in tensors for rank, _ in tensor.chunks()})
        files: list[FileRecord] = []
        try:
            for rank in ranks:
                contents = Contents(self.chunks(tensors, rank))
                record = write_file(self.target, contents, save_id=self.save_id, rank=rank)
                if record is not None:
                    files.append(record)
        except BaseException:
            for rank in ranks:
                discard(self.target, self.save_id, rank)
            raise
        return files

    def chunks(self, tensors: Sequence[StoredTensor], rank: int) -> list[Chunk]:
        """Return a rank's chunks in file order; small ones are read together in batches."""
        found = [(tensor, box) for tensor in tensors for box in tensor.chunks_of(rank)]
        found.sort(key=lambda item: -item[0].dtype.itemsize)
        chunks: list[Chunk] = []
        batch = _Batch(self)
        for tensor, box in found:
            if not batch.has_room(tensor, box):
                batch = _Batch(self)
            batch.add(tensor, box)
            chunks.append(Chunk(tensor=tensor, box=box, source=_BatchSource(batch, tensor, box)))
        return chunks

    def read(self, wanted: Sequence[tuple[StoredTensor, Box]]) -> list[Array]:
        """Return the items of some boxes of new tensors, from the old files."""
        arrays = [np.empty(box.sizes, dtype=f"u{tensor.dtype.itemsize}") for tensor, box in wanted]
        wants = [
            Want(tensor=self.data.manifest.tensors[t.name], box=box, sink=ArraySink(array))
            for (t, box), array in zip(wanted, arrays, strict=True)
        ]
        execute(plan_reads(self.data, wants))
        self.done += sum(array.nbytes for array in arrays)
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)
        return arrays


@dataclass(slots=True)
class _Batch:
    """Neighbouring chunks of a new file that are read from the old files in one go."""

    job: _Reshard
    members: dict[tuple[str, Box], StoredTensor] = field(
        default_factory=dict[tuple[str, Box], StoredTensor]
    )
    num_bytes: int = 0
    arrays: dict[tuple[str, Box], Array] | None = None

    def has_room(self, tensor: StoredTensor, box: Box) -> bool:
        num_bytes = box.numel * tensor.dtype.itemsize
        return not self.members or self.num_bytes + num_bytes <= PIECE_BYTES

    def add(self, tensor: StoredTensor, box: Box) -> None:
        self.members[(tensor.name, box)] = tensor
        self.num_bytes += box.numel * tensor.dtype.itemsize

    def pieces(self, tensor: StoredTensor, box: Box, max_bytes: int) -> Iterator[Array]:
        if self.num_bytes > max_bytes:  # one chunk larger than a batch: in parts
            for part in box.parts(max_bytes // tensor.dtype.itemsize):
                yield self.job.read([(tensor, part)])[0]
            return
        if self.arrays is None:
            wanted = [(t, box) for (_, box), t in self.members.items()]
            arrays = self.job.read(wanted)
            self.arrays = dict(zip(self.members, arrays, strict=True))
        yield self.arrays.pop((tensor.name, box))


@dataclass(frozen=True, slots=True)
class _BatchSource:
    batch: _Batch
    tensor: StoredTensor
    box: Box

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for array in self.batch.pieces(self.tensor, self.box, max_bytes):
            yield array.reshape(-1).view(np.uint8).data
