"""Lazy reading: open a checkpoint and take slices of its tensors."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dtckpt.errors import LayoutMismatch

from ..dtensor.box import Box
from ..dtensor.irregular import IrregularLayout
from ..dtensor.layout import Layout
from ..storage.base import Store
from ..storage.open import open_store
from .manifest import Manifest, read_manifest
from .plan import StoredTensor
from .reading import ReadCache, Want, execute, plan_reads
from .stored import StoredData
from .tree import unflatten

if TYPE_CHECKING:
    from types import EllipsisType

    import torch

    Index = int | slice | EllipsisType


def open(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a committed checkpoint for reading; only its manifest is read now.

    Needs no process group. Raises NotCommitted where there is no checkpoint and Corrupt where its
    manifest is damaged.
    """
    store = open_store(checkpoint_id, **dict(storage_options or {}))
    return Checkpoint(store, read_manifest(store))


class Checkpoint(Mapping[str, "LazyTensor"]):
    """An open checkpoint: a mapping from tensor names to tensors that are read when indexed."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.manifest = manifest
        self._data = StoredData(store, manifest)
        self._cache = ReadCache()

    @property
    def url(self) -> str:
        """Where the checkpoint is."""
        return self._data.store.url

    @property
    def metadata(self) -> Any:
        """The JSON value that was given at save."""
        return self.manifest.metadata

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self.manifest.tensors:
            near = [other for other in self.manifest.tensors if other.endswith(name)][:3]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise KeyError(f"{self.url} has no tensor {name!r}{hint}")
        return LazyTensor(self._data, self.manifest.tensors[name], self._cache)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def state_dict(self, *, allow_pickle: bool = False) -> Any:
        """Return the saved structure with all values; tensors stay lazy until they are indexed."""
        return unflatten(
            self.manifest.tree, lambda name, _tag: self[name], allow_pickle=allow_pickle
        )

    def close(self) -> None:
        """Release what the store holds open."""
        self._data.store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.url!r} of {len(self)} tensors>"


class LazyTensor:
    """A stored tensor. Indexing reads the bytes that the index needs, verifies and returns them.

    ``tensor[...]`` reads all of it, ``tensor[2:5, :, -1]`` a part, as a new tensor on the CPU.
    """

    def __init__(self, data: StoredData, stored: StoredTensor, cache: ReadCache) -> None:
        self._data = data
        self._stored = stored
        self._cache = cache

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return self._stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """Torch dtype."""
        import torch

        return getattr(torch, self._stored.dtype.torch_name)

    @property
    def layout(self) -> Layout | IrregularLayout:
        """Layout that it was saved with."""
        return self._stored.layout

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read a part; supports ints, slices with positive steps and one Ellipsis."""
        box, rest = _resolve(index, self.shape, self.name)
        return self.read(box)[rest]

    def read(self, box: Box) -> torch.Tensor:
        """Return the elements of a box as a contiguous CPU tensor of its sizes."""
        import torch

        from .transfer import TensorSink

        out = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
        reads = plan_reads(self._data, [Want(tensor=self._stored, box=box, sink=TensorSink(out))])
        execute(reads, cache=self._cache)
        return out

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r} {self._stored.dtype.torch_name}{list(self.shape)}>"


def _int(part: Any) -> int:
    """Return an index given as a Python or numpy integer."""
    if isinstance(part, bool):
        raise TypeError(f"expected an int, a slice or ..., got {part!r}")
    return operator.index(part)


def _resolve(
    index: Index | tuple[Index, ...], shape: tuple[int, ...], name: str
) -> tuple[Box, tuple[int | slice, ...]]:
    """Return the box that an index needs and the index to apply to the box's elements."""
    given = index if isinstance(index, tuple) else (index,)
    parts = [part if part is Ellipsis or isinstance(part, slice) else _int(part) for part in given]
    if parts.count(Ellipsis) == 0:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    fill = len(shape) - (len(parts) - 1)
    if fill < 0 or parts.count(Ellipsis) > 1:
        raise IndexError(f"too many indices for tensor {name!r} of shape {shape}: {index}")
    parts[at : at + 1] = [slice(None)] * fill
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[int | slice] = []
    for part, size in zip(parts, shape, strict=True):
        if isinstance(part, int):
            if not -size <= part < size:
                raise IndexError(f"index {part} is out of range for a dim of {size} in {name!r}")
            offsets.append(part % size)
            sizes.append(1)
            rest.append(0)
        elif isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 0:
                raise LayoutMismatch(f"tensor {name!r}: slices need a positive step, got {part}")
            offsets.append(start)
            sizes.append(max(stop - start, 0))
            rest.append(slice(None, None, step))
        else:
            raise TypeError(f"tensor {name!r} takes ints, slices and ..., got {part!r}")
    return Box(tuple(offsets), tuple(sizes)), tuple(rest)
