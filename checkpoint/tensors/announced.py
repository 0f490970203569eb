"""Boxes that a tensor announces itself: who says what a rank holds.

Four protocols are understood. torch.distributed.checkpoint asks ``__create_chunk_list__`` and
``__create_write_items__``, of which those of a local tensor count before those of its class and
before placements: Megatron-FSDP splits DTensors unevenly and says so there. torch's public
protocol since 2.14, ``CheckpointableTensor``, has ``global_shape``, ``global_offsets``,
``local_offsets`` and ``local_sizes``; a local tensor may have the leading dims of its boxes as one.
A ShardedTensor, as FSDP1 and torchrec make them, lists ``local_shards()``. Any of them may name
several boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from dtckpt.errors import LayoutMismatch, PlacementError

from ...dtensor.geometry.box import Box

_CHUNKS, _WRITES = "__create_chunk_list__", "__create_write_items__"
_SHARD = "__get_tensor_shard__"
_SLICES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_SHARDS = ("local_shards", "sharding_spec")
_TELLING = frozenset({_CHUNKS, _WRITES, *_SLICES, *_SHARDS})
_HINTS = (
    *(_CHUNKS, _WRITES, _SHARD),
    *_SLICES,
    *_SHARDS,
    *("global_offset", "local_shape", "placements"),
    *("device_mesh", "_local_tensor", "_local_shard"),
)
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that are their own memory, as nearly all tensors are."""

Parts = list[tuple[Box, torch.Tensor]]


@dataclass(slots=True, eq=False)
class BoxedTensor:
    """The boxes that this rank holds of a tensor, in tensors of their own."""

    shape: torch.Size
    """Of the global tensor."""
    dtype: torch.dtype
    parts: dict[Box, torch.Tensor] = field(default_factory=dict[Box, torch.Tensor])


def announces(value: Any) -> bool:
    """Whether a value says by one of the protocols what this rank holds; cheap for plain tensors.

    Not for DTensors, whose class always does.
    """
    if type(value) in PLAIN_TENSORS and (not vars(value) or _TELLING.isdisjoint(vars(value))):
        return False
    if isinstance(value, BoxedTensor):
        return True
    return _has_hooks(value) or _has_slices(value) or has_shards(value)


def overrides(value: Any, base: type) -> bool:
    """Whether a class derived from ``base`` announces boxes in a way of its own."""
    cls = type(value)
    own, given = getattr(cls, _CHUNKS, None), getattr(base, _CHUNKS, None)
    return issubclass(cls, base) and own is not None and own is not given


def hint_of_parts(value: Any) -> str:
    """Return an attribute by which a tensor of an unknown class may be a part of another, or ""."""
    return next((hint for hint in _HINTS if hasattr(value, hint)), "")


def announced_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of the global tensor."""
    hooked = _has_hooks(value) or not _has_slices(value)
    return tuple(value.shape if hooked else value.global_shape)


def announced_parts(name: str, teller: Any, whole: Any, local: Any) -> Parts:
    """Return the boxes that ``teller`` announces of ``whole``, with their elements in ``local``.

    Raises LayoutMismatch where there is no telling which elements belong to which box, and for what
    is no box.
    """
    try:
        return _parts(name, teller, whole, local)
    except PlacementError as error:
        raise LayoutMismatch(f"tensor {name!r}: {error}") from error


def _parts(name: str, teller: Any, whole: Any, local: Any) -> Parts:
    if isinstance(teller, BoxedTensor):
        return [(box, part) for box, part in teller.parts.items() if not box.is_empty]
    if not _has_hooks(teller):
        return _slices(name, teller, local) if _has_slices(teller) else _shards(teller)
    boxes = [box for box in _boxes(name, teller, whole) if not box.is_empty]
    if hasattr(teller, _SHARD):
        from torch.distributed.checkpoint.metadata import MetadataIndex

        return [
            (box, getattr(teller, _SHARD)(MetadataIndex(name, torch.Size(box.offsets))))
            for box in boxes
        ]
    if len(boxes) > 1:
        raise LayoutMismatch(
            f"tensor {name!r} announces {len(boxes)} boxes ({', '.join(map(str, boxes[:3]))}), but "
            f"has no {_SHARD} to tell which elements are whose"
        )
    return [(box, local) for box in boxes]


def _boxes(name: str, teller: Any, whole: Any) -> list[Box]:
    if hasattr(teller, _CHUNKS):
        chunks = getattr(teller, _CHUNKS)()
    else:
        items = getattr(teller, _WRITES)(name, whole)
        chunks = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]


def _has_hooks(value: Any) -> bool:
    return hasattr(value, _CHUNKS) or hasattr(value, _WRITES)


def _has_slices(value: Any) -> bool:
    return all(hasattr(value, attribute) for attribute in _SLICES)


def has_shards(value: Any) -> bool:
    """Whether a value is a ShardedTensor, for which torch has few operators: even what it is on is
    told by its shards alone."""
    return all(hasattr(value, attribute) for attribute in _SHARDS)


def _shards(teller: Any) -> Parts:
    """Return the shards of a ShardedTensor, which knows where each of them lies."""
    found = [(shard.metadata, shard.tensor) for shard in teller.local_shards()]
    parts = [(Box(tuple(at.shard_offsets), tuple(at.shard_sizes)), t) for at, t in found]
    return [(box, tensor) for box, tensor in parts if not box.is_empty]


def _slices(name: str, teller: Any, local: torch.Tensor) -> Parts:
    """Return the parts of a tensor that lists offsets in the global and in the local tensor."""
    shape, *lists = (tuple(getattr(teller, attribute)) for attribute in _SLICES)
    parts: Parts = []
    if len({len(entries) for entries in lists}) != 1:
        raise LayoutMismatch(
            f"tensor {name!r}: {', '.join(_SLICES[1:])} have {list(map(len, lists))} entries; "
            "expected one each for every box"
        )
    for start, inner, sizes in zip(*lists, strict=True):
        box = Box(tuple(start), tuple(sizes))
        held = _sizes_in_rows(box.sizes, tuple(local.shape))
        source = None if held is None or len(inner) != len(held) else Box(tuple(inner), held)
        if (
            source is None
            or box.ndim != len(shape)
            or not Box.whole(tuple(shape)).contains(box)
            or not Box.whole(tuple(local.shape)).contains(source)
        ):
            raise LayoutMismatch(
                f"tensor {name!r} announces {box} of a tensor of the shape {list(shape)} at "
                f"{list(inner)} of its own shape {list(local.shape)}, which does not lie in them"
            )
        if not box.is_empty:
            parts.append((box, local[source.slices].view(box.sizes)))
    return parts


def _sizes_in_rows(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the sizes that a box has in a local tensor, which may have its leading dims as one.

    None where the local tensor has no such dims: all but the first must be those of the box then.
    """
    merged = len(sizes) - len(shape) + 1
    if merged == 1:
        return sizes
    if merged < 1 or not shape or sizes[merged:] != shape[1:]:
        return None
    return (math.prod(sizes[:merged]), *sizes[merged:])
