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
        """Return the box that this rank holds, or nothing where it is empty.

        Raises PlacementError where an axis is Partial: such a tensor has no values yet.
        """
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        _require_values(self)
        box = self.spec.box
        if box is None or box.is_empty:
            return []
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return one item for the box that this rank holds; replicas write equal items."""
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
        """Return the local tensor, which torch reads from or writes to."""
        _require_values(self)
        box = self.spec.box
        if box is None or index.offset not in (None, torch.Size(box.offsets)):
            raise PlacementError(
                f"{index.fqn!r}: this rank holds {box} of shape {tuple(self.shape)}, and no chunk "
                f"at offset {index.offset}"
            )
        return self.local.detach()


def _require_values(tensor: Wrapper) -> None:
    spec = tensor.spec
    if spec.layout.is_partial:
        raise PlacementError(
            f"a tensor of shape {tuple(spec.shape)} with placements "
            f"({format_placements(spec.placements)}) has no values before it is reduced; "
            "redistribute it to Replicate or Shard before it is saved or loaded"
        )
