"""The states that are saved: those of a transformer in training, with values to check.

Every element is a function of its tensor's name and its global index, so that a loaded shard of any
layout is compared without the state that was saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_MODULUS = 251
"""Whole numbers below it are exact in every dtype used."""
_COLUMNS = 256
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


def alike(size: int, tensor_bytes: int) -> Iterator[Shape]:
    """Yield float32 tensors of so many bytes each, about ``size`` in all."""
    rows = max(tensor_bytes // (4 * _COLUMNS), 1)
    for number in range(max(size // tensor_bytes, 1)):
        yield Shape(name=f"block.{number}", shape=(rows, _COLUMNS), dtype=torch.float32)


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


class State(Protocol):
    """What is saved and loaded again."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """DTensors, or plain ones, by name."""
        ...

    @property
    def group(self) -> Any:
        """The ranks that have it together; None for this process alone."""
        ...

    @property
    def rank(self) -> int:
        """The number of this process among them."""
        ...

    @property
    def locals(self) -> dict[str, Tensor]:
        """What this process holds, by name."""
        ...

    def clear(self) -> None:
        """Overwrite what this process holds, so that what is found afterwards was loaded."""
        ...

    def check(self) -> None:
        """Raise ValueError unless all elements are what they were filled with."""
        ...


class SmallState:
    """Very many small plain tensors of one process, or the same on all ranks of a group."""

    def __init__(self, number: int, elements: int, group: Any = None, rank: int = 0) -> None:
        self.group = group
        self.rank = rank
        self.tensors = {f"block.{i}": torch.full((elements,), float(i)) for i in range(number)}

    @property
    def locals(self) -> dict[str, Tensor]:
        return self.tensors

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def check(self) -> None:
        for i, tensor in enumerate(self.tensors.values()):
            if tensor[0] != i or tensor[-1] != i:
                raise ValueError(f"tensor {i} was loaded with other values than those saved")


class ShardedState:
    """A state on a mesh of one axis, each tensor a torch DTensor."""

    def __init__(self, mesh: DeviceMesh, shapes: Iterator[Shape], dim: int, *, fill: bool) -> None:
        """Make all tensors, cut along ``dim`` (vectors along 0); not filled they are all zero."""
        self.group: Any = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.tensors: dict[str, DTensor] = {}
        self._starts: dict[str, tuple[int, int]] = {}
        for shape in shapes:
            cut = min(dim, len(shape.shape) - 1)
            start, count = _piece(shape.shape[cut], mesh.size(), self.rank)
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
        return {name: tensor.to_local() for name, tensor in self.tensors.items()}

    @property
    def slices(self) -> dict[str, tuple[slice, ...]]:
        """Where in the whole tensors lies what this rank holds, by name."""
        found: dict[str, tuple[slice, ...]] = {}
        for name, local in self.locals.items():
            cut, start = self._starts[name]
            at = (start if dim == cut else 0 for dim in range(local.ndim))
            found[name] = tuple(slice(a, a + n) for a, n in zip(at, local.shape, strict=True))
        return found

    @property
    def local_bytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(tensor.nbytes for tensor in self.locals.values())

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def clear(self) -> None:
        for tensor in self.locals.values():
            tensor.fill_(-1)

    def renew(self) -> None:
        """Take new tensors in the place of all, to which nobody has written."""
        for name, tensor in list(self.tensors.items()):
            local = torch.empty_like(tensor.to_local())
            self.tensors[name] = DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )

    def check(self) -> None:
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
