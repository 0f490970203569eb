"""Saving: flatten, agree, write in parallel, commit once."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import AlreadyCommitted, CheckpointError

from ..storage.base import Store
from ..storage.open import open_store
from .agreeing import Record, agree, describe
from .committing import check_free, commit, discard, prepare
from .manifest import FileRecord, Manifest
from .plan import StoredTensor, assign_writers
from .ranks import Ranks, ranks_of, together
from .spec import GlobalState, StateSpec, split_per_rank
from .tensors import LocalTensor, local_tensor, tensor_tag
from .tree import flatten
from .writing import Chunk, write_file

_SAVE_ID_BYTES = 8


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


def save(
    state_dict: Mapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    process_group: Any = None,
    no_dist: bool = False,
    overwrite: bool = False,
    metadata: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> SaveReport:
    """Write a checkpoint and return when it is durable and committed.

    Every rank of ``process_group`` (default: the default group; without one, or with ``no_dist``,
    this process alone) calls this with its part of the state: a dict, nested at will, of DTensors
    of ours or torch's, plain tensors and numpy arrays (which count as replicated and must be equal
    on all ranks; see ``PerRank``), objects with ``state_dict()``, and plain values. Tensors are
    read as they are during the call.

    ``checkpoint_id`` is a directory, a URL such as ``s3://bucket/run/step-1000`` (with
    ``storage_options`` passed on to its driver), or a ``Store``. ``metadata`` is any JSON value
    and is kept in the manifest. ``allow_pickle`` pickles values that the format does not hold.

    Raises the same error on every rank: AlreadyCommitted before anything is written if a
    checkpoint is there and ``overwrite`` is not set; Unsavable, LayoutMismatch, StorageError or
    another CheckpointError naming the rank, the phase and the cause. After an error no half-written
    checkpoint is ever taken for one, and one that was there is as it was, unless the very last
    step went through and only its confirmation was lost (a rank died in the commit): then the new
    one is there, complete.
    """
    ranks = ranks_of(process_group, no_dist=no_dist)
    job = _Save(ranks, overwrite=overwrite, allow_pickle=allow_pickle)
    return job.run(state_dict, checkpoint_id, dict(storage_options or {}), metadata)


class _Save:
    """One save on one rank; holds what the phases hand on."""

    store: Store
    tensors: dict[str, LocalTensor]
    shared: StateSpec
    per_rank: StateSpec
    save_id: str

    def __init__(self, ranks: Ranks, *, overwrite: bool, allow_pickle: bool) -> None:
        self.ranks = ranks
        self.overwrite = overwrite
        self.allow_pickle = allow_pickle

    @property
    def is_coordinator(self) -> bool:
        return self.ranks.rank == self.ranks.all[0]

    def run(
        self,
        state: Mapping[Any, Any],
        target: str | os.PathLike[str] | Store,
        options: dict[str, Any],
        metadata: Any,
    ) -> SaveReport:
        answers = together(
            self.ranks, "save: plan", lambda: self.describe(state, target, options, metadata)
        )
        records = [Record.from_bytes(answer) for answer in answers]
        self.save_id = records[0].save_id.hex()
        whole = agree(self.ranks, records, self.shared, self.per_rank, self.digests_of)
        stored = assign_writers(whole.tensors)
        files = self.write(stored)
        self.commit(stored, whole, files, metadata)
        mine = [record.size for record in files if record.rank == self.ranks.rank]
        return SaveReport(
            url=self.store.url,
            save_id=self.save_id,
            num_tensors=len(stored),
            total_bytes=sum(tensor.num_bytes for tensor in stored),
            written_bytes=sum(mine),
        )

    def describe(
        self,
        state: Mapping[Any, Any],
        target: str | os.PathLike[str] | Store,
        options: dict[str, Any],
        metadata: Any,
    ) -> bytes:
        """Flatten the state and return this rank's record."""
        self.store = open_store(target, **options)
        if self.is_coordinator:
            check_free(self.store, overwrite=self.overwrite)
            _check_metadata(metadata)
        rank = self.ranks.rank
        flat = flatten(state, rank=rank, tensor_tag=tensor_tag, allow_pickle=self.allow_pickle)
        self.tensors = {name: local_tensor(name, value) for name, value in flat.tensors.items()}
        for tensor in self.tensors.values():
            tensor.check_rank(rank)
        alone = len(self.ranks.all) == 1  # then there is nobody to compare plain tensors with
        specs = {name: tensor.spec(hashed=not alone) for name, tensor in self.tensors.items()}
        self.shared, self.per_rank = split_per_rank(StateSpec(flat.tree, specs))
        save_id = secrets.token_bytes(_SAVE_ID_BYTES)
        return describe(self.shared, self.store.url, save_id).to_bytes()

    def digests_of(self, name: str) -> dict[str, str]:
        """Return the hash of every box of a tensor that this rank holds."""
        return self.tensors[name].digests() if name in self.tensors else {}

    def write(self, stored: tuple[StoredTensor, ...]) -> list[FileRecord]:
        """Write this rank's data file and return the records of all ranks."""
        rank = self.ranks.rank

        def write_own() -> bytes:
            chunks = [
                Chunk(tensor=tensor, box=box, source=self.tensors[tensor.name].source(box))
                for tensor in stored
                for box in tensor.chunks_of(rank)
            ]
            record = write_file(self.store, chunks, save_id=self.save_id, rank=rank)
            return json.dumps(record.to_json()).encode() if record else b""

        # Only a failure that all ranks know of: else the others may be about to commit the file.
        answers = together(
            self.ranks,
            "save: write",
            write_own,
            on_failure=lambda _: discard(self.store, self.save_id, rank),
        )
        return [FileRecord.from_json(json.loads(answer)) for answer in answers if answer]

    def commit(
        self,
        stored: tuple[StoredTensor, ...],
        whole: GlobalState,
        files: list[FileRecord],
        metadata: Any,
    ) -> None:
        """Let the coordinator check all files and publish the manifest, and wait until it has."""
        manifest: list[Manifest] = []

        def check() -> bytes:
            if self.is_coordinator:
                made = prepare(
                    self.store,
                    save_id=self.save_id,
                    tensors=stored,
                    tree=whole.tree,
                    files=files,
                    metadata=metadata,
                )
                manifest.append(made)
            return b""

        def publish() -> bytes:
            for made in manifest:
                commit(self.store, made, overwrite=self.overwrite)
            return b""

        def discard_own(_: CheckpointError) -> None:
            discard(self.store, self.save_id, self.ranks.rank)

        def discard_if_lost(error: CheckpointError) -> None:
            if isinstance(error, AlreadyCommitted):  # certain, unlike other failures to publish
                discard_own(error)

        together(self.ranks, "save: check files", check, on_failure=discard_own)
        together(self.ranks, "save: commit", publish, on_failure=discard_if_lost)


def _check_metadata(metadata: Any) -> None:
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"metadata must be a JSON value (None, bool, number, str, list, dict): {error}"
        ) from error
