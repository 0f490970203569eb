"""The states that are saved: those of a transformer in training, with values to check.

Every element is a function of its tensor's name and its global index, so that a loaded shard of any
layout is compared without the state that was saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_MODULUS = 251
"""Whole numbers below it are exact in every dtype used."""
_ITEM_BYTES = 2 + 4 + 4
"""A weight in bfloat16 and its two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tensor of the whole job."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def transformer(size: int, layers: int) -> Iterator[Shape]:
    """Yield the tensors of a state of about ``size`` bytes: weights and two moments of each."""
    squares = (16 + 12 * layers) * _ITEM_BYTES
    hidden = max(8, int((size / squares) ** 0.5) // 8 * 8)
    for name, shape in _weights(hidden, layers):
        yield Shape(name=f"model/{name}", shape=shape, dtype=torch.bfloat16)
        yield Shape(name=f"optimizer/exp_avg/{name}", shape=shape, dtype=torch.float32)
        yield Shape(name=f"optimizer/exp_avg_sq/{name}", shape=shape, dtype=torch.float32)


def _weights(hidden: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embedding", (16 * hidden, hidden)
    for layer in range(layers):
        yield f"layers.{layer}.attention.qkv", (3 * hidden, hidden)
        yield f"layers.{layer}.attention.out", (hidden, hidden)
        yield f"layers.{layer}.mlp.up", (4 * hidden, hidden)
        yield f"layers.{layer}.mlp.down", (hidden, 4 * hidden)
        yield f"layers.{layer}.norm1", (hidden,)
        yield f"layers.{layer}.norm2", (hidden,)
    yield "norm", (hidden,)


class ShardedState:
    """A state on a mesh of one axis, each tensor a torch DTensor."""

    def __init__(self, mesh: DeviceMesh, shapes: Iterator[Shape], dim: int, *, fill: bool) -> None:
        """Make all tensors, cut along ``dim`` (vectors along 0); not filled they are all zero."""
        self.mesh = mesh
        self.tensors: dict[str, DTensor] = {}
        self._starts: dict[str, tuple[int, int]] = {}
        for shape in shapes:
            cut = min(dim, len(shape.shape) - 1)
            start, count = _piece(shape.shape[cut], mesh.size(), mesh.get_local_rank())
            local_shape = list(shape.shape)
            local_shape[cut] = count
            local = torch.zeros(local_shape, dtype=shape.dtype)
            self.tensors[shape.name] = DTensor.from_local(
                local,
                mesh,
                [Shard(cut)],
                run_check=False,
                shape=torch.Size(shape.shape),
                stride=local.new_empty(shape.shape, device="meta").stride(),
            )
            self._starts[shape.name] = (cut, start)
            if fill:
                local.copy_(self._expected(shape.name, local))

    @property
    def locals(self) -> dict[str, Tensor]:
        """This rank's shards by name."""
        return {name: tensor.to_local() for name, tensor in self.tensors.items()}

    @property
    def local_bytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(tensor.nbytes for tensor in self.locals.values())

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def clear(self) -> None:
        """Overwrite this rank's shards, so that what is found afterwards was loaded."""
        for tensor in self.locals.values():
            tensor.fill_(-1)

    def check(self) -> None:
        """Raise ValueError unless all elements are what they were filled with."""
        for name, tensor in self.locals.items():
            if not torch.equal(tensor, self._expected(name, tensor)):
                raise ValueError(f"{name}: other values than those that were saved")

    def _expected(self, name: str, local: Tensor) -> Tensor:
        cut, start = self._starts[name]
        value = torch.full((), zlib.crc32(name.encode()) % _MODULUS, dtype=torch.int32)
        for dim, size in enumerate(local.shape):
            first = start if dim == cut else 0
            index = torch.arange(first, first + size, dtype=torch.int32) * (7 - 4 * dim)
            value = value.unsqueeze(-1) + index
        return value.remainder_(_MODULUS).to(local.dtype)


def _piece(size: int, parts: int, number: int) -> tuple[int, int]:
    """Return start and length of a piece as ``torch.chunk`` cuts it."""
    step = -(-size // parts)
    start = min(number * step, size)
    return start, min(step, size - start)
