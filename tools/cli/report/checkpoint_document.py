"""What the page of a checkpoint shows, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....checkpoint.examining.balance import held_by_ranks
from ....dtensor import IrregularLayout
from ..common.console import count, iec, mesh_text, printable
from ..common.treeview import plain_values
from ..common.valuetext import value_text
from .layouts import Layouts

if TYPE_CHECKING:
    from ....checkpoint import Manifest, TensorStatistics

_MAX_VALUES = 2_000


def checkpoint_document(url: str, manifest: Manifest) -> dict[str, Any]:
    """Return what the manifest tells; statistics, timing and a comparison are added to it.

    Tensors are columns of equal length, since there may be ten thousands of them; ``layout`` and
    ``dtype`` are indices into ``layouts`` and ``dtypes``.
    """
    layouts = Layouts()
    tensors = list(manifest.tensors_of_state.values())
    dtypes = {tensor.dtype.torch_name: None for tensor in tensors}
    number = {name: i for i, name in enumerate(dtypes)}
    values = [[printable(name), value_text(node)] for name, node in plain_values(manifest.tree)]
    return {
        "kind": "checkpoint",
        "url": url,
        "facts": _facts(manifest),
        "dtypes": [*dtypes],
        "tensors": {
            "name": [printable(tensor.name) for tensor in tensors],
            "dtype": [number[tensor.dtype.torch_name] for tensor in tensors],
            "shape": [tensor.shape for tensor in tensors],
            "bytes": [tensor.num_bytes for tensor in tensors],
            "stored": [tensor.stored_bytes for tensor in tensors],
            "layout": [layouts.number(tensor.layout) for tensor in tensors],
            "tied": {i: printable(t.same_as) for i, t in enumerate(tensors) if t.same_as},
        },
        "layouts": layouts.documents,
        "values": values[:_MAX_VALUES],
        "more_values": max(len(values) - _MAX_VALUES, 0),
        "files": [
            [printable(manifest.path_of(record)), record.rank, record.size]
            for record in manifest.files
        ],
        "held": held_by_ranks(manifest),
    }


def statistics_document(found: Mapping[str, TensorStatistics]) -> dict[str, Any]:
    """Return what the values of tensors are like, as columns in the order of ``found``."""
    items = list(found.values())
    return {
        "min": [item.min for item in items],
        "max": [item.max for item in items],
        "mean": [item.mean for item in items],
        "std": [item.std for item in items],
        "zeros": [item.num_zero for item in items],
        "nan": [item.num_nan for item in items],
        "inf": [item.num_posinf + item.num_neginf for item in items],
        "bad": [item.num_nan + item.num_posinf + item.num_neginf for item in items],
        "histogram": [item.histogram.counts if item.histogram else None for item in items],
        "range": [
            (item.histogram.edges[0], item.histogram.edges[-1]) if item.histogram else None
            for item in items
        ],
    }


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    tensor_bytes = sum(tensor.stored_bytes for tensor in manifest.tensors_of_state.values())
    file_bytes = sum(record.size for record in manifest.files)
    layouts = [tensor.layout for tensor in manifest.tensors_of_state.values()]
    meshes = {lay.mesh: None for lay in layouts if not isinstance(lay, IrregularLayout)}
    facts = [
        ("Tensors", f"{len(manifest.tensors_of_state):,}, {iec(tensor_bytes)}"),
        ("Files", f"{len(manifest.files):,}, {iec(file_bytes)}"),
        ("Format", f"dtckpt {manifest.version}" if manifest.is_ours else manifest.format),
    ]
    if manifest.is_ours:
        facts += [("Created", manifest.created), ("Save", manifest.save_id)]
        facts += [("Mesh", f"{mesh_text(mesh)}: {count(mesh.size, 'rank')}") for mesh in meshes]
    lenders = dict.fromkeys(file.source for file in manifest.borrowed)
    facts += [("Refers to", printable(source)) for source in lenders]
    if manifest.metadata is not None:
        facts.append(("Metadata", printable(json.dumps(manifest.metadata, ensure_ascii=False))))
    return facts
