"""Lazy reading: open a checkpoint and take slices of its tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtckpt.errors import CheckpointError, Corrupt, ObjectNotFound

from ..dtensor.geometry.box import Box
from ..dtensor.geometry.irregular import IrregularLayout
from ..dtensor.geometry.layout import Layout
from ..storage.base import Store
from .files.manifest import Manifest, read_own_manifest
from .files.stored_data import StoredData
from .files.stored_tensor import StoredTensor
from .formats.beside import not_there
from .formats.opening import open_place, read_manifest, stored_data
from .mapping.table import TensorMapping, mapped_manifest
from .reading.execution import ReadCache
from .reading.indices import resolve
from .state.tree import unflatten

if TYPE_CHECKING:
    import torch

    from .reading.indices import Index


def open(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    mapping: TensorMapping | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a committed checkpoint for reading; only its manifest is read now.

    Weights as Hugging Face's libraries save them are opened, too, from the headers of their files.

    ``mapping`` is a table of rules, or a list of them, through which its tensors are seen and read.

    Needs no process group. Raises NotCommitted where there is no checkpoint and Corrupt where its
    manifest is damaged, and LayoutMismatch where the mapping does not fit it.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    return Checkpoint(store, mapped_manifest(read_manifest(store), mapping, store.url))


class Checkpoint(Mapping[str, "LazyTensor"]):
    """An open checkpoint: a mapping from tensor names to tensors that are read when indexed.

    It and its tensors may be pickled, as for the workers of a data loader, if the store may: other
    processes open the files themselves, and refuse those that are not the ones of the manifest.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.manifest = manifest
        self._data = stored_data(store, manifest)
        self._cache = ReadCache()
        self._packed = manifest.packed_names

    @property
    def url(self) -> str:
        """Where the checkpoint is."""
        return self._data.store.url

    @property
    def metadata(self) -> Any:
        """The JSON value that was given at save."""
        return self.manifest.metadata

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self.manifest.tensors or name in self._packed:
            near = [other for other in self.manifest.tensors if other.endswith(name)][:3]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            if why := not_there(self.manifest, name):
                hint += f"; {why}"
            raise KeyError(f"{self.url} has no tensor {name!r}{hint}")
        return self._lazy(name)

    def _lazy(self, name: str) -> LazyTensor:
        return LazyTensor(self._data, self.manifest.tensors[name], self._cache)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.manifest.tensors if name not in self._packed)

    def __len__(self) -> int:
        return len(self.manifest.tensors) - len(self._packed)

    def state_dict(self, *, allow_pickle: bool = False) -> Any:
        """Return the saved structure with all values; tensors stay lazy until they are indexed.

        Long lists and other packed values are read from the data files now.
        """
        return unflatten(
            self.manifest.tree, lambda name, _tag: self._lazy(name), allow_pickle=allow_pickle
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


def check_not_replaced(data: StoredData, error: CheckpointError) -> None:
    """Raise ObjectNotFound, saying so, where another save has replaced the checkpoint.

    Tensors of the new one are not given in place of the old ones: some may have been read before.
    """
    if not data.manifest.is_ours:
        return
    try:
        now = read_own_manifest(data.store)
    except CheckpointError:
        return  # what the read failed with says more
    if now.save_id != data.manifest.save_id:
        raise ObjectNotFound(
            f"{data.store.url}: another save has replaced the checkpoint since it was opened. Open "
            "it again"
        ) from error


class LazyTensor:
    """A stored tensor. Indexing reads the bytes that the index needs, verifies and returns them.

    ``tensor[...]`` reads all of it, ``tensor[2:5, :, -1]`` or ``tensor[[0, 7]]`` a part, as a new
    tensor on the CPU; ``tensor.to("cuda")`` and ``numpy.asarray(tensor)`` read all of it, too.
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

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._stored.num_bytes

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Read all of it; arguments are those of ``torch.Tensor.to``: a device, a dtype."""
        return self[...].to(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Read all of it as a numpy array, of torch's dtypes those that numpy has."""
        if copy is False:
            raise ValueError(f"tensor {self.name!r} cannot be an array without being read")
        array = self[...].numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read a part; supports ints, slices with positive steps, one Ellipsis, one list or mask.

        A list of ints or a mask is of one dim, and only its rows are read.
        """
        import torch

        wanted = resolve(index, self.shape, self.name)
        if len(wanted.boxes) == 1:
            return self.read(wanted.boxes[0])[wanted.rest]
        parts = self._read(wanted.boxes) or [torch.empty(wanted.sizes, dtype=self.dtype)]
        return torch.cat(parts, wanted.dim)[wanted.rest]

    def read(self, box: Box) -> torch.Tensor:
        """Return the elements of a box as a contiguous CPU tensor of its sizes."""
        return self._read([box])[0]

    def _read(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        from .reading.to_tensors import read_boxes  # which imports torch

        try:
            return read_boxes(self._data, self._stored, boxes, self._cache)
        except (Corrupt, ObjectNotFound) as error:
            check_not_replaced(self._data, error)
            raise

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r} {self._stored.dtype.torch_name}{list(self.shape)}>"
