"""Offline resharding: rewrite a checkpoint for another mesh, without ranks and in bounded memory.

It is the same algorithm as everywhere: the boxes of the new layout are intersected with those of
the old one, and exactly those bytes are streamed from file to file, verified as they are read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..dtensor.geometry.mesh import Mesh
from ..storage.base import Store
from ..storage.open import open_store
from .files.committing import check_complete, check_free, commit, discard
from .files.manifest import FileRecord, Manifest
from .files.stored_data import StoredData
from .files.stored_tensor import StoredTensor
from .files.writing import Chunk, Contents, write_file
from .formats.opening import open_place, read_manifest, stored_data
from .mapping.table import TensorMapping, mapped_manifest
from .placing import Rule, place
from .reading.batches import BatchedReader, counted
from .saving.writers import assign_writers
from .tensors.spec import GlobalTensor


def reshard(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    mesh: Mesh,
    rules: Sequence[Rule],
    *,
    mapping: TensorMapping | None = None,
    overwrite: bool = False,
    compress: Literal["zstd"] | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write ``source`` anew at ``target`` as if it had been saved from ``mesh``.

    ``rules`` place the tensors as ``place`` says, and ``mapping`` makes others of them first: all
    names are then those that it gives. ``compress`` is that of ``save``. Memory is bounded whatever
    the size; ``on_progress(done, total)`` is called with bytes written. The target is committed at
    the end or not at all. Errors are those of ``load`` and ``save``.
    """
    if compress not in (None, "zstd"):
        raise ValueError(f"compress is None or 'zstd', got {compress!r}")
    old = open_place(source, **dict(source_options or {}))
    new = open_store(target, **dict(target_options or {}))
    manifest = mapped_manifest(read_manifest(old), mapping, old.url)
    check_free(new, overwrite=overwrite)
    tensors = assign_writers(
        GlobalTensor(
            name=p.tensor.name, dtype=p.tensor.dtype, shape=p.tensor.shape, layout=p.layout
        )
        for p in place(manifest, mesh, rules)
    )
    total = sum(tensor.num_bytes for tensor in tensors)
    data = stored_data(old, manifest)
    job = Rewriting(data, BatchedReader(data, counted(on_progress, total)), new, compress == "zstd")
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
class Rewriting:
    """Data files of a checkpoint that is written anew from another one."""

    data: StoredData
    reader: BatchedReader
    target: Store
    is_compressed: bool = False
    save_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def write_all(self, tensors: Sequence[StoredTensor]) -> list[FileRecord]:
        """Write what the writers of some tensors hold; nothing is left of it after an error."""
        ranks = sorted({rank for tensor in tensors for rank, _ in tensor.chunks()})
        files: list[FileRecord] = []
        try:
            for rank in ranks:
                contents = Contents(self.chunks(tensors, rank))
                record = write_file(
                    self.target,
                    contents,
                    save_id=self.save_id,
                    rank=rank,
                    is_compressed=self.is_compressed,
                )
                if record is not None:
                    files.append(record)
            self.data.check_unchanged()
        except BaseException:
            for rank in ranks:
                discard(self.target, self.save_id, rank)
            raise
        return files

    def chunks(self, tensors: Sequence[StoredTensor], rank: int) -> list[Chunk]:
        """Return a rank's chunks in file order; small ones are read together in batches."""
        found = [(tensor, box) for tensor in tensors for box in tensor.chunks_of(rank)]
        found.sort(key=lambda item: -item[0].dtype.itemsize)
        sources = self.reader.sources([(tensor.name, box) for tensor, box in found])
        return [
            Chunk(tensor=tensor, box=box, source=source)
            for (tensor, box), source in zip(found, sources, strict=True)
        ]
