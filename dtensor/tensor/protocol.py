"""The protocol by which torch.distributed.checkpoint saves and loads foreign tensors.

Torch asks a tensor for the chunk that this rank holds, for the items to write, and for the local
tensor of a chunk. Nothing of torch's checkpoint package is imported before it asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtckpt.errors import PlacementError

from ..geometry.placement import format_placements
from .wrapper import Wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Checkpointable(Wrapper):
    """Answers torch.distributed.checkpoint; a mixin of ``DTensor``.

    Neither class has slots of its own: torch's stager of asynchronous saves copies what it finds in
    ``__slots__`` of the instance, which must be those of ``Wrapper``.
    """

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds, one in most layouts, without empty ones.

        Raises PlacementError where an axis is Partial: such a tensor has no values yet.
        """
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        _require_values(self)
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box, _ in self.spec.parts()
            if not box.is_empty
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return one item for each box that this rank holds; replicas write equal items."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of a chunk in local memory, which torch reads from or writes to."""
        _require_values(self)
        parts = self.spec.parts()
        for box, place in parts:
            is_only = index.offset is None and len(parts) == 1
            if is_only or index.offset == torch.Size(box.offsets):
                return self.local.detach()[place.slices]
        held = ", ".join(str(box) for box, _ in parts) or "nothing"
        raise PlacementError(
            f"{index.fqn!r}: this rank holds {held} of shape {tuple(self.shape)}, and no chunk at "
            f"offset {index.offset}"
        )


def _require_values(tensor: Wrapper) -> None:
    spec = tensor.spec
    if spec.layout.is_partial:
        raise PlacementError(
            f"a tensor of shape {tuple(spec.shape)} with placements "
            f"({format_placements(spec.placements)}) has no values before it is reduced; "
            "redistribute it to Replicate or Shard before it is saved or loaded"
        )
