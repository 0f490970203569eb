"""One job of rewriting as any process sees it: planned alike by all, its files written by some."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import dtckpt

from ...storage.base import Store
from ...storage.open import open_store
from ..files.committing import check_complete, check_free, commit, discard, refuse_if_other
from ..files.manifest import FileRecord, Manifest
from ..formats.opening import (
    ManifestText,
    manifest_text,
    open_place,
    parse_manifest,
    stored_data,
)
from ..reading.batches import BatchedReader
from .changes import Changes, Plan
from .rewriting import Rewriting

Place = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every process that writes is told; all else follows."""

    source: Place
    target: Place
    changes: Changes
    source_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    target_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    overwrite: bool = False
    text: ManifestText = field(default_factory=ManifestText)
    """The manifest of the source, as one process has read it for all."""
    num_local: int = 1
    """How many processes of this machine write."""
    save_id: str = ""
    """The same whenever the same is made of the same source, so that its files are found again."""
    replaced: str | None = None
    """Save id of the checkpoint that is at the target and may be replaced."""


class Work:
    """The stores and the plan of an order."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.on_read: Callable[[int], None] = lambda _: None
        """Called with bytes after each read."""
        self.old = open_place(order.source, **order.source_options)
        self.new = open_store(order.target, **order.target_options)

    def begin(self) -> Order:
        """Read the manifest and look whether there is room; return the order with what was found.

        One process does this for all.
        """
        replaced = check_free(self.new, overwrite=self.order.overwrite)
        text = manifest_text(self.old)
        save_id = self._save_id(text, replaced)
        self.order = replace(self.order, text=text, save_id=save_id, replaced=replaced)
        return self.order

    def plan(self) -> Plan:
        """Plan all files, as every process does alike."""
        text = self.order.text
        manifest = parse_manifest(text.text, self.old.url, text.seen)
        self.planned = self.order.changes.plan(manifest, self.old.url)
        self.data = stored_data(self.old, self.planned.source)
        self.rewriting = Rewriting(
            self.data,
            BatchedReader(
                self.data,
                lambda num_bytes: self.on_read(num_bytes),
                num_local=self.order.num_local,
            ),
            self.new,
            self.order.changes.is_compressed,
            self.order.save_id,
        )
        return self.planned

    def write(self, rank: int) -> FileRecord | None:
        """Write the file of a rank, unless it is there from an earlier call; it is whole then."""
        tensors = self.planned.tensors
        found = self.rewriting.find(tensors, rank)
        if found is not None:
            self.on_read(self.planned.bytes_of(rank))
            return found
        return self.rewriting.write(tensors, rank)

    def write_all(self, ranks: Iterable[int]) -> Iterator[FileRecord]:
        """Write the files of some ranks."""
        for rank in ranks:
            record = self.write(rank)
            if record is not None:
                yield record
        self.data.check_unchanged()

    def finish(self, files: Iterable[FileRecord]) -> Manifest:
        """Commit what all processes have written."""
        source = self.planned.source
        made = Manifest(
            save_id=self.order.save_id,
            tensors={tensor.name: tensor for tensor in self.planned.tensors},
            tree=source.tree,
            files=tuple(sorted(files, key=lambda record: record.rank)),
            metadata=source.metadata,
        )
        check_complete(self.new, made)
        refuse_if_other(self.new, self.order.replaced)
        commit(self.new, made, overwrite=self.order.overwrite)
        return made

    @contextmanager
    def giving_up(self, ranks: Iterable[int]) -> Generator[None]:
        """Take away what was written for some ranks if the block fails and nobody goes on with it.

        What comes of files without checksums may be a mixture of two versions of them.
        """
        try:
            yield
        except BaseException:
            if not self.planned.source.is_ours:
                for rank in ranks:
                    discard(self.new, self.order.save_id, rank)
            raise

    def _save_id(self, text: ManifestText, replaced: str | None) -> str:
        """Return an id that tells source, options, version and what is replaced from all others.

        Files of other programs have no checksums that would tell whether they are as an earlier
        call has read them, so nothing of that counts.
        """
        manifest = parse_manifest(text.text, self.old.url, text.seen)
        if not manifest.is_ours:
            return secrets.token_hex(8)
        told = hashlib.blake2b(manifest.to_bytes(), digest_size=8)
        told.update(self.order.changes.digest())
        told.update(f"{self.old.url}\n{replaced}\n{dtckpt.__version__}\n".encode())
        return told.hexdigest()
