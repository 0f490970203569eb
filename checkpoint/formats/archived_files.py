"""Files of archives, opened: which bytes are the elements of each chunk."""

from __future__ import annotations

from dtckpt.errors import CheckpointError, Corrupt

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ..files.datafile import Entry
from ..files.manifest import FileRecord, Manifest, Place
from ..files.stored_data import DataFile, check_size
from ..files.stored_tensor import StoredTensor
from ..state.limits import shown
from .archives import Archive, Span, open_archives
from .files import data_file
from .unpickling import TensorNote, load_pickle


def open_file(store: Store, manifest: Manifest, record: FileRecord) -> DataFile:
    """Return a file of archives, of which the headers are read; Corrupt where one is no such."""
    name = manifest.path_of(record)
    check_size(store, name, record.size)
    spans = list(dict.fromkeys(Span(place.start, place.size) for place in record.places))
    archives = dict(zip(spans, open_archives(store, name, spans), strict=True))
    entries: dict[str, Entry] = {}
    for place in record.places:
        archive = archives[Span(place.start, place.size)]
        key, _, box = place.key.partition("[")
        tensor = manifest.tensors[key]
        sizes = Box.parse("[" + box).sizes if box else tensor.shape
        start = place.start + _elements(archive, place, tensor, sizes)
        num_bytes = Box.whole(sizes).numel * tensor.dtype.itemsize
        shape = tensor.dtype.file_shape(sizes)
        entries[place.key] = Entry(place.key, tensor.dtype, shape, start, num_bytes, 0)
    return data_file(store, name, record, entries)


def _elements(archive: Archive, place: Place, tensor: StoredTensor, sizes: tuple[int, ...]) -> int:
    """Return where in an archive the elements of a chunk begin."""
    archive.check_byte_order()
    where = f"{archive.where}, {place.key!r}"
    record, skip = place.record, place.skip
    if not record:
        note = load_pickle(archive.read("data.pkl"), where)
        if not isinstance(note, TensorNote) or (note.shape, note.dtype(where)) != (
            sizes,
            tensor.dtype,
        ):
            raise Corrupt(
                f"{where}: expected a {tensor.dtype.torch_name} tensor of shape {sizes}, got "
                f"{shown(note)}"
            )
        check_contiguous(note, where)
        record, skip = f"data/{note.storage.key}", note.start * tensor.dtype.itemsize
    span = archive.span(record)
    if skip < 0 or skip + Box.whole(sizes).numel * tensor.dtype.itemsize > span.size:
        raise Corrupt(f"{where}: the record {record!r} of {span.size} bytes ends in the elements")
    return span.start + skip


def check_contiguous(note: TensorNote, where: str) -> None:
    """Raise CheckpointError for a tensor whose elements are in another order in the file."""
    if not note.is_contiguous:
        raise CheckpointError(
            f"{where}: a tensor of shape {note.shape} was saved with strides {note.strides}, "
            "transposed; load it with torch and save its contiguous() anew"
        )
