"""Torch tensors and numpy arrays as the rest of the package sees them: specs, sources and sinks.

Accepted are our DTensors, torch's DTensors (FSDP2, tensor parallel, HSDP), any other tensor that
announces its boxes (``announced.py``), plain tensors and numpy arrays, and plain tensors with a
layout beside them. What the local tensor of a DTensor announces counts before what its class
announces, and that before its placements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from dtckpt.errors import LayoutMismatch, Unsavable

from ...dtensor.comm.caches import remembered
from ...dtensor.geometry.box import Box
from ...dtensor.geometry.layout import Layout
from .announced import (
    PLAIN_TENSORS,
    BoxedTensor,
    announced_parts,
    announced_shape,
    announces,
    hint_of_parts,
)
from .dtensors import is_dtensor, layout_of, require_elements, require_storable_layout
from .dtypes import BY_TORCH_NAME, DType
from .local_shard import LocalShard
from .memory_order import memory_order
from .sampling import Sampling
from .source import PIECE_BYTES
from .spec import TensorSpec
from .subclasses import is_subclass, refusal
from .transfer import TensorSource

Array = np.ndarray[Any, Any]

_HELD = (torch.Tensor, LocalShard, BoxedTensor)
_ARRAYS = (np.ndarray, np.memmap)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A tensor as this rank holds it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    layout: Layout | None
    """Mesh and placements where there are any."""
    is_plain: bool
    """Whether every rank that has the name holds the whole tensor."""
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """Boxes that this rank holds, with tensors of their sizes."""
    order: tuple[int, ...] | None = None
    """Order of the dims of the global tensor in memory, where it is known not to be row-major."""

    def spec(self, same_as: str | None = None) -> TensorSpec:
        """Return what this rank tells the others, and which tensor has the same memory."""
        boxes = None
        if self.layout is None and not self.is_plain:
            boxes = tuple(box for box, _ in self.parts)
        return TensorSpec(
            dtype=self.dtype,
            shape=self.shape,
            layout=self.layout,
            boxes=boxes,
            same_as=same_as,
            order=self.order,
        )

    def digests(self, sampling: Sampling | None = None) -> Iterator[tuple[Box, str]]:
        """Yield every box that this rank holds with the xxh3_128 of its bytes, in hex digits.

        Or of those bytes that stand for them.
        """
        for box, tensor in self.parts:
            hasher = xxhash.xxh3_128()
            told = tensor.detach()
            if sampling is not None:
                told = sampling.of(told)
            for piece in TensorSource(told).pieces(PIECE_BYTES):
                hasher.update(piece)
            yield box, hasher.hexdigest()

    def check_rank(self, rank: int) -> None:
        """Raise LayoutMismatch unless ``rank`` of the process group is this rank of the mesh."""
        if self.layout is None:
            return
        held = _held_by(self.layout, rank)
        if [box for box, _ in self.parts] != held:
            raise LayoutMismatch(
                f"tensor {self.name!r}: rank {rank} of the process group would hold "
                f"{held or 'nothing'} of {self.layout}, but the tensor's own mesh says "
                f"{[str(box) for box, _ in self.parts] or 'nothing'}. Give the process group that "
                "the mesh was made from, and the rank in it"
            )

    def part(self, box: Box) -> torch.Tensor:
        """Return the elements of a box that this rank holds."""
        for held, tensor in self.parts:
            if held == box:
                return tensor.detach()
            if held.contains(box):
                return tensor.detach()[box.relative_to(held).slices]
        raise LayoutMismatch(
            f"tensor {self.name!r}: this rank was to write {box} but holds "
            f"{', '.join(str(held) for held, _ in self.parts) or 'nothing'}"
        )


def tensor_tag(value: object) -> str | None:
    """Say how a value is stored: "tensor", "ndarray", or None if it is not a tensor at all."""
    if isinstance(value, _HELD) or _speaks_protocol(value):
        return "tensor"
    if type(value) in _ARRAYS:  # others, such as masked arrays, hold more
        return "ndarray"
    return None


def local_tensor(name: str, value: Any) -> LocalTensor:
    """Return how this rank holds ``value``; a DTensor knows by itself which rank it is on.

    Raises Unsavable for tensors that have no bytes of their own (meta, sparse, quantized) or a
    dtype outside of the format, and LayoutMismatch where a local shard is not what its layout
    says.
    """
    if type(value) in PLAIN_TENSORS and not announces(value):  # nearly all, of very many
        return _plain(name, value)
    if type(value) in _ARRAYS:
        return _plain(name, _tensor_of_array(name, value))
    if isinstance(value, LocalShard):
        require_storable_layout(name, value.layout)
        local = _own_memory(name, value.tensor, is_shard=True)
        return _laid_out(name, local, value.layout, value.coordinate)
    if is_dtensor(value):
        local = getattr(value, "_local_tensor", None)  # private in torch
        if local is not None and announces(local):
            require_elements(name, value.placements)
            return _announced(name, local, value, local)
        layout = layout_of(name, value)
        if layout is not None:
            return _distributed(name, value, layout)
    if announces(value):
        return _announced(name, value, value, value)
    return _plain(name, _own_memory(name, value))


def _plain(name: str, tensor: torch.Tensor) -> LocalTensor:
    if type(tensor) is torch.nn.Parameter and _is_flat(tensor):
        raise Unsavable(
            f"tensor {name!r} is a FlatParameter of FullyShardedDataParallel: this rank's part of "
            "several parameters, one after the other, of which it does not say which they are. "
            "Save the state_dict() of the wrapped module, or the module"
        )
    dtype = _check(name, tensor)
    shape = tuple(tensor.shape)
    return LocalTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        layout=None,
        is_plain=True,
        parts=((Box.whole(shape), tensor),),
        order=memory_order(tensor),
    )


def _is_flat(parameter: torch.nn.Parameter) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(parameter, fsdp.FlatParameter)


def _distributed(name: str, value: Any, layout: Layout) -> LocalTensor:
    shard = getattr(value, "_local_tensor", None)  # private in torch
    shard = value.to_local().detach() if shard is None else shard
    local = _own_memory(name, shard, is_shard=True)
    laid_out = _laid_out(name, local, layout, value.device_mesh.get_coordinate())
    order = memory_order(value)  # that of its parts may be any where they have few elements
    return laid_out if order is None else replace(laid_out, order=order)


# A state has few layouts for very many tensors, and each save asks again.


@remembered(1024)
def _box_at(layout: Layout, coordinate: tuple[int, ...]) -> Box:
    return layout.box(coordinate)


@remembered(1024)
def _held_by(layout: Layout, rank: int) -> list[Box]:
    return list(layout.held_by(rank))


def _laid_out(
    name: str, local: torch.Tensor, layout: Layout, coordinate: Sequence[int] | None
) -> LocalTensor:
    parts: tuple[tuple[Box, torch.Tensor], ...] = ()
    if coordinate is not None:
        box = _box_at(layout, tuple(coordinate))
        if box.is_empty and local.numel() == 0:
            local = local.view(box.sizes)  # FSDP2 makes empty parts empty along other dims too
        if tuple(local.shape) != box.sizes:
            raise LayoutMismatch(
                f"tensor {name!r}: the layout {layout} gives coordinate {tuple(coordinate)} the "
                f"box {box}, but its local shard has the shape {tuple(local.shape)}. Say how the "
                "tensor really is split, for instance with a Ragged placement"
            )
        if layout.is_dealt:
            own = layout.parts(tuple(coordinate))
            parts = tuple((held, local[place.slices]) for held, place in own)
        else:
            parts = ((box, local),)
    return LocalTensor(
        name=name,
        dtype=_check(name, local),
        shape=layout.shape,
        layout=layout,
        is_plain=False,
        parts=parts,
    )


def _announced(name: str, teller: Any, value: Any, local: Any) -> LocalTensor:
    """Return a tensor whose boxes ``teller`` announces: the value itself or its local tensor."""
    found = announced_parts(name, teller, value, local)
    parts = tuple(
        (box, _own_memory(name, shard, is_part=True, is_shard=True)) for box, shard in found
    )
    dtype = dtype_of(name, value.dtype)
    shape = tuple(value.shape) if teller is not value else announced_shape(value)
    outside = [box for box, _ in parts if not Box.whole(shape).contains(box)]
    if outside:
        raise LayoutMismatch(
            f"tensor {name!r} announces {outside[0]}, which does not lie in its shape {list(shape)}"
        )
    for box, shard in parts:
        if (_check(name, shard), tuple(shard.shape)) != (dtype, box.sizes):
            raise LayoutMismatch(
                f"tensor {name!r} announces {dtype.torch_name}{list(box.sizes)} at {box}, but the "
                f"shard there is {shard.dtype}{list(shard.shape)}"
            )
    return LocalTensor(
        name=name, dtype=dtype, shape=shape, layout=None, is_plain=False, parts=parts
    )


def _speaks_protocol(value: object) -> bool:
    return hasattr(value, "__create_chunk_list__") and hasattr(value, "__get_tensor_shard__")


def _own_memory(
    name: str, tensor: Any, *, is_part: bool = False, is_shard: bool = False
) -> torch.Tensor:
    """Return a tensor whose elements are its own memory; Unsavable for wrappers of others.

    So, too, for those that may be a part of something, unless it is known of what. The result of a
    collective that is under way is waited for.
    """
    if hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    parameter = torch.nn.parameter
    if isinstance(tensor, parameter.UninitializedParameter | parameter.UninitializedBuffer):
        raise Unsavable(
            f"tensor {name!r} is not initialised yet; run a forward pass of the module first"
        )
    cls = type(tensor)
    if cls in PLAIN_TENSORS:
        return tensor
    if is_subclass(tensor):
        raise refusal(name, tensor, is_shard=is_shard)
    hint = "" if is_part else hint_of_parts(tensor)
    if hint:
        raise Unsavable(
            f"tensor {name!r} is (or has as its shard) a {cls.__module__}.{cls.__qualname__}, "
            f"which has {hint} and so may be a part of a tensor, and there is no telling which. "
            "Offer __create_chunk_list__ and __get_tensor_shard__, or save plain tensors"
        )
    return tensor.as_subclass(torch.Tensor)


def _check(name: str, tensor: torch.Tensor) -> DType:
    if tensor.is_nested:
        raise refusal(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unsavable(
            f"tensor {name!r} has the layout {tensor.layout}"
            f"{' and is quantized' if tensor.is_quantized else ''}; only dense tensors can be "
            "stored. Save the tensors that it consists of"
        )
    if tensor.device.type == "meta":
        raise Unsavable(
            f"tensor {name!r} is on the meta device, so it has no values to save. Load a "
            "checkpoint into its module first, or make the module on its device"
        )
    return dtype_of(name, tensor.dtype)


def dtype_of(name: str, dtype: torch.dtype | None) -> DType:
    """Return the element type of a tensor; Unsavable, with its name, where files have none."""
    found = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if found is None:
        remedy = ". Save its real and imaginary parts, as torch.view_as_real(tensor) has them"
        raise Unsavable(
            f"tensor {name!r} has the dtype {dtype}, which files do not hold; expected one of "
            f"{', '.join(BY_TORCH_NAME)}{remedy if dtype and dtype.is_complex else ''}"
        )
    return found


def _tensor_of_array(name: str, array: Array) -> torch.Tensor:
    if array.dtype.name not in BY_TORCH_NAME or not array.dtype.isnative:
        raise Unsavable(
            f"numpy array {name!r} has the dtype {array.dtype.str}; expected one of "
            f"{', '.join(BY_TORCH_NAME)} in native byte order"
        )
    return torch.from_numpy(array if is_shared(array) else array.copy())


def is_shared(array: Array) -> bool:
    """Whether torch can share an array's memory; else only its values can be had, by a copy."""
    strides = array.strides
    return array.flags.writeable and all(s >= 0 and s % array.itemsize == 0 for s in strides)
