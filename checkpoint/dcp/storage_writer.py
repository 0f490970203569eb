"""dtckpt as a storage of torch.distributed.checkpoint: what its planner plans, written our way."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dtckpt.errors import CheckpointError, LayoutMismatch

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ...storage.open import open_store
from ..files.committing import check_complete, check_free, commit, discard
from ..files.manifest import FileRecord, Manifest
from ..files.stored_tensor import StoredTensor
from ..files.writing import Chunk, Contents, write_file
from ..formats.trees import name_of
from ..state.limits import json_copy
from ..state.values import Node
from ..tensors.local_tensor import local_tensor
from ..tensors.transfer import TensorSource
from .checked_stager import staged
from .chunk_layouts import ChunkLayouts
from .item_values import node_of_value, value_of_item
from .place import AtPlace, Target
from .write_plan import Ticket, WritePlan, box_of, place_of, planned_dtype


class CheckpointWriter(AtPlace, StorageWriter):
    """Writes a checkpoint of dtckpt wherever a ``storage_writer`` of DCP is taken.

    What the planner has planned is written as ``save`` writes: a data file a rank, with checksums,
    and the manifest last, which is the commit. A save that fails leaves no checkpoint, and one that
    was there as it was; where one rank has failed, files of the others are left over until
    ``clean``. ``load``, ``open`` and ``CheckpointReader`` read the result.

    ``checkpoint_id``, ``overwrite``, ``metadata``, ``storage_options``, ``allow_pickle`` and
    ``compress`` are those of ``save``. Where a save gives a ``checkpoint_id``, too, that counts.

    ``save_id`` is the id of the last save, as its manifest has it; None before one is planned.

    Works with ``async_save``, ``no_dist`` and any process group. Plans that are kept from save to
    save, and ranks that save without one another (``use_collectives=False``), are refused.
    """

    def __init__(
        self,
        checkpoint_id: Target | None = None,
        *,
        overwrite: bool = False,
        metadata: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        compress: Literal["zstd"] | None = None,
    ) -> None:
        if compress not in (None, "zstd"):
            raise ValueError(f"compress is None or 'zstd', got {compress!r}")
        AtPlace.__init__(self, checkpoint_id)
        self.overwrite = overwrite
        self.metadata = metadata
        self.storage_options = dict(storage_options or {})
        self.allow_pickle = allow_pickle
        self.compress = compress
        self._is_coordinator = False
        self._plan: WritePlan | None = None
        self.save_id: str | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to ``checkpoint_id`` where it is given."""
        AtPlace.reset(self, checkpoint_id)
        self._plan = None
        self.save_id = None

    # Torch takes a writer with these for the stager, unless it is given one.

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        """Return a copy of a state dict; Unsavable where torch would copy memory of nothing."""
        return staged(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` has copied all."""

    def close(self) -> None:
        """Do nothing: ``stage`` keeps nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn who this rank is; CheckpointError where ranks are to save without one another."""
        refuse_alone(use_collectives=kwargs.get("use_collectives", True))
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Find out whether there can be a checkpoint; AlreadyCommitted where there may not."""
        if not getattr(plan, "usable", True):
            raise CheckpointError(
                "the planner keeps its plan from the save before (enable_plan_caching=True), and "
                "with it where that save has written; leave enable_plan_caching out"
            )
        if self._is_coordinator:
            check_free(self.store, overwrite=self.overwrite)
            json_copy(self.metadata)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make names and layouts of the plans of all ranks, and tell each what it has to know."""
        made = self._plan = WritePlan.of(plans, self.store.url)
        self.save_id = made.save_id
        return [
            replace(plan, storage_data=made.ticket(rank, plan)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file, with what the planner resolves as it is written."""
        ticket = plan.storage_data
        if not isinstance(ticket, Ticket):
            raise CheckpointError(
                "the planner has dropped storage_data from its plan, which tells where to write; "
                "let finish_plan keep it"
            )
        self.save_id = ticket.save_id
        store = self.store
        part = _Part(ticket, planner, store.url, self.allow_pickle)
        chunks = [chunk for item in plan.items for chunk in part.chunks(item)]
        record = write_file(
            store,
            Contents(chunks),
            save_id=ticket.save_id,
            rank=ticket.rank,
            is_compressed=self.compress == "zstd",
        )
        written = _Written(record=record, values=part.values, tensors=part.tensors)
        results = [WriteResult(item.index, 0, None) for item in plan.items]
        if results:
            results[0] = replace(results[0], storage_data=written)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all that was planned is there, and commit it."""
        plan = self._plan
        if plan is None:
            raise CheckpointError("finish() of a save that was not planned")
        store, self._plan = self.store, None
        written = [result.storage_data for one in results for result in one if result.storage_data]
        records = [one.record for one in written if one.record is not None]
        try:
            made = self._manifest(plan, written, store.url)
            check_complete(store, made)
        except BaseException:
            self._discard(store, plan, records)
            raise
        try:
            commit(store, made, overwrite=self.overwrite)
        except CheckpointError as error:
            if error.is_certain:  # else it may yet appear, and need its files
                self._discard(store, plan, records)
            raise
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def _manifest(self, plan: WritePlan, written: Sequence[_Written], url: str) -> Manifest:
        values = {fqn: node for one in written for fqn, node in one.values.items()}
        missing = plan.paths.keys() - plan.tensors.keys() - values.keys()
        if missing:
            raise LayoutMismatch(
                f"{url}: no rank has written {sorted(missing)[:5]}, which the planner had planned"
            )
        stored = [*plan.tensors.values(), *(tensor for one in written for tensor in one.tensors)]
        return Manifest(
            save_id=plan.save_id,
            tensors={tensor.name: tensor for tensor in stored},
            tree=plan.tree(values, url),
            files=tuple(one.record for one in written if one.record is not None),
            metadata=json_copy(self.metadata),
        )

    @staticmethod
    def _discard(store: Store, plan: WritePlan, records: Sequence[FileRecord]) -> None:
        for record in records:
            discard(store, plan.save_id, record.rank)

    def storage_meta(self) -> StorageMeta | None:
        """Return where this save goes to, and its id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def store(self) -> Store:
        """The store to write to."""
        return open_store(self.place, **self.storage_options)


def refuse_alone(*, use_collectives: bool) -> None:
    """Raise CheckpointError where ranks are to save without one another."""
    if not use_collectives:
        raise CheckpointError(
            "use_collectives=False makes a checkpoint on each rank, and one of dtckpt is one "
            "of all ranks: leave it out, or save with no_dist=True to a place for each rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a rank has written; goes to the coordinator with its first result."""

    record: FileRecord | None
    values: Mapping[str, Node]
    """Nodes of values by their flat names."""
    tensors: Sequence[StoredTensor]
    """Tensors that lie within values."""


class _Part:
    """One rank's part of a save."""

    def __init__(self, ticket: Ticket, planner: SavePlanner, url: str, allow_pickle: bool) -> None:
        self._ticket = ticket
        self._planner = planner
        self._url = url
        self._allow_pickle = allow_pickle
        self._layouts = ChunkLayouts()
        self.values: dict[str, Node] = {}
        self.tensors: list[StoredTensor] = []

    def chunks(self, item: WriteItem) -> Iterator[Chunk]:
        """Yield the chunks of an item; a value is read here, a tensor as it is written."""
        path = self._ticket.paths[item.index.fqn]
        if item.type != WriteItemType.BYTE_IO:
            if place_of(item) not in self._ticket.skipped:
                size = () if item.tensor_data is None else tuple(item.tensor_data.size)
                tensor = self._stored(name_of(path), planned_dtype(item), size)
                box = Box.whole(size) if 0 in size else box_of(item)
                yield Chunk(tensor=tensor, box=box, source=_Resolved(self._planner, item))
            return
        value = value_of_item(self._planner, item, path)
        node, tensors = node_of_value(value, path, self._url, allow_pickle=self._allow_pickle)
        self.values[item.index.fqn] = node
        for found in tensors:
            tensor = self._stored(found.name, found.dtype, found.shape)
            self.tensors.append(tensor)
            box = Box.whole(found.shape)
            yield Chunk(tensor=tensor, box=box, source=TensorSource(found.part(box)))

    def _stored(self, name: str, dtype: Any, shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor of which this rank writes all, or a chunk that is named alike."""
        layout = self._layouts.of(shape, {Box.whole(shape): self._ticket.rank})
        return StoredTensor(name, dtype, shape, layout)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """The bytes of a chunk, for which the planner is asked when they are written."""

    planner: SavePlanner
    item: WriteItem

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes; LayoutMismatch where the planner resolves to another tensor."""
        name, box, dtype = self.item.index.fqn, box_of(self.item), planned_dtype(self.item)
        resolved = self.planner.resolve_data(self.item)
        if not isinstance(resolved, torch.Tensor):
            raise LayoutMismatch(f"tensor {name!r}: the planner resolves it to {type(resolved)}")
        found = local_tensor(name, resolved)
        has_sizes = found.shape == box.sizes or (box.is_empty and 0 in found.shape)
        if not (found.is_plain and found.dtype == dtype and has_sizes):
            raise LayoutMismatch(
                f"tensor {name!r}: planned as {dtype.torch_name}{list(box.sizes)}, but the planner "
                f"resolves it to {found.dtype.torch_name}{list(found.shape)}"
            )
        yield from TensorSource(found.part(Box.whole(found.shape))).pieces(max_bytes)
