"""Checkpoints of dtckpt, and all that it reads, as a storage of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dtckpt.errors import CheckpointError, LayoutMismatch

from ...dtensor.geometry.box import Box
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..formats.flat_names import FlatLeaf, flat_leaves
from ..formats.opening import open_place, read_manifest, stored_data
from ..loading.casting import (
    ConvertingSink,
    DTypePolicy,
    check_policy,
    may_convert,
    torch_dtype,
)
from ..reading.execution import execute
from ..reading.packed_values import holds_dicts, with_plain_values
from ..reading.read_plan import plan_reads
from ..reading.wants import Sink, Want
from ..tensors.local_tensor import local_tensor
from ..tensors.transfer import TensorSink
from .item_values import pickled, stored_value
from .place import AtPlace, Target

_BATCH_BYTES = 1 << 30
"""Read at once: planners may take memory for each item that they resolve."""


class CheckpointReader(AtPlace, StorageReader):
    """Reads a checkpoint of dtckpt wherever a ``storage_reader`` of DCP is taken.

    So, too, all that ``load`` reads: checkpoints of DCP itself, of Hugging Face, of ``torch.save``.
    Each rank reads the blocks that hold what its planner wants, and verifies them, whatever the
    layout that was saved; Corrupt, with file and byte range, where one is damaged.

    Names are those that DCP would have given: ``{"model": {"w": ...}}`` is ``model.w``.
    ``storage_options``, ``allow_pickle`` and ``dtype_policy`` are those of ``load``, except that by
    default tensors are cast to what they are loaded into, as DCP does it.
    """

    def __init__(
        self,
        checkpoint_id: Target | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        dtype_policy: DTypePolicy = "cast",
        allow_pickle: bool = False,
    ) -> None:
        AtPlace.__init__(self, checkpoint_id)
        check_policy(dtype_policy)
        self.storage_options = dict(storage_options or {})
        self.dtype_policy: DTypePolicy = dtype_policy
        self.allow_pickle = allow_pickle
        self._found: _Found | None = None
        self.load_id = secrets.token_hex(8)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of ``checkpoint_id`` where it is given."""
        AtPlace.reset(self, checkpoint_id)
        self._found = None
        self.load_id = secrets.token_hex(8)

    def read_metadata(self) -> Metadata:
        """Return what is there, as DCP describes it: every tensor as one chunk.

        Which bytes of which file hold a part of it is found out when it is read. Errors are those
        of ``open``.
        """
        store = open_place(self.place, **self.storage_options)
        manifest = read_manifest(store)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._found = found = _Found(manifest, stored_data(store, manifest), rank)
        return Metadata(
            state_dict_metadata=found.described(),
            planner_data=found.paths(),
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id, save_id=manifest.save_id, load_id=self.load_id
            ),
            version=CURRENT_DCP_VERSION,
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Make sure that what is there is known, and what of it is this rank's own.

        Only here DCP says which rank of the group this one is, so ``metadata`` changes where that
        is another one than in the job.
        """
        if self._found is None:
            self.read_metadata()
        found, rank = self._found, kwargs.get("rank")
        if found is not None and rank is not None and rank != found.rank:
            self._found = found = _Found(found.manifest, found.data, rank)
            metadata.state_dict_metadata = found.described()
            metadata.planner_data = found.paths()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is: each rank reads for itself."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items in parallel, verified, into what the planner resolves them to."""
        if self._found is None:
            raise CheckpointError("read_data() before read_metadata()")
        tensors: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                leaf = self._found.leaf(item.storage_index.fqn)
                planner.load_bytes(item, pickled(self._found.value(leaf, self.allow_pickle)))
            else:
                tensors.append(item)
        for batch in _batches(tensors, self._found):
            targets = [planner.resolve_tensor(item).detach() for item in batch]
            wants = [
                self._found.want(item, target, self.dtype_policy)
                for item, target in zip(batch, targets, strict=True)
            ]
            execute(plan_reads(self._found.data, wants))
            for item, target in zip(batch, targets, strict=True):
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Found:
    """A checkpoint that is read by one rank of some."""

    def __init__(self, manifest: Manifest, data: StoredData, rank: int) -> None:
        remedy = "load it by dtckpt's load, which tells them apart"
        self.manifest = manifest = with_plain_values(manifest, data, holds_dicts)
        self.data = data
        self.rank = rank
        self.leaves = flat_leaves(manifest.tree, data.store.url, remedy, rank=rank)

    def described(self) -> dict[str, STORAGE_TYPES]:
        """Return what DCP has to know of every leaf, by its name."""
        return {name: _metadata_of(self.tensor(leaf)) for name, leaf in self.leaves.items()}

    def paths(self) -> dict[str, Any]:
        """Return where every leaf stands in the state, by its name."""
        return {name: leaf.path for name, leaf in self.leaves.items()}

    def leaf(self, name: str) -> FlatLeaf:
        """Return a leaf; LayoutMismatch where there is none of the name."""
        if name not in self.leaves:
            raise LayoutMismatch(f"{self.data.store.url}: there is nothing of the name {name!r}")
        return self.leaves[name]

    def tensor(self, leaf: FlatLeaf) -> StoredTensor | None:
        """Return the tensor that a leaf is; None for a value."""
        return None if leaf.tensor is None else self.manifest.tensors[leaf.tensor]

    def value(self, leaf: FlatLeaf, allow_pickle: bool) -> Any:
        """Return a value; tensors in it are read whole."""
        return stored_value(leaf.node, self.manifest, self.data, allow_pickle=allow_pickle)

    def want(self, item: ReadItem, target: torch.Tensor, policy: DTypePolicy) -> Want:
        """Return what is to be read for an item; LayoutMismatch where its target does not fit."""
        name = item.storage_index.fqn
        stored = self.tensor(self.leaf(name))
        if stored is None:
            raise LayoutMismatch(f"{name!r} is a value in {self.data.store.url}, and no tensor")
        found = local_tensor(name, target)
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if not found.is_plain or found.shape != box.sizes:
            raise LayoutMismatch(
                f"tensor {name!r}: the planner wants {box} and gives a tensor of "
                f"{list(found.shape)} to load it into"
            )
        if not may_convert(policy, stored.dtype, found.dtype):
            raise LayoutMismatch(
                f"tensor {name!r} was saved as {stored.dtype.torch_name} and is to be loaded as "
                f"{found.dtype.torch_name}, which dtype_policy={policy!r} does not convert"
            )
        sink: Sink = TensorSink(found.part(Box.whole(box.sizes)))
        if stored.dtype != found.dtype:
            sink = ConvertingSink(sink, stored.dtype, found.dtype)
        return Want(tensor=stored, box=box, sink=sink)


def _metadata_of(tensor: StoredTensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if tensor is None:
        return BytesStorageMetadata()
    size = torch.Size(tensor.shape)
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(tensor.dtype)),
        size,
        [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


def _batches(items: Sequence[ReadItem], found: _Found) -> Iterator[list[ReadItem]]:
    """Yield items that are read together: about as many bytes each time."""
    batch: list[ReadItem] = []
    held = 0
    for item in items:
        tensor = found.tensor(found.leaf(item.storage_index.fqn))
        itemsize = 1 if tensor is None else tensor.dtype.itemsize
        held += item.lengths.numel() * itemsize
        batch.append(item)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
