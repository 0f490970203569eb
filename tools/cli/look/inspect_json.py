"""A checkpoint as one JSON document, for ``dtckpt inspect --json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ....checkpoint.examining.balance import Balance, file_balance, rank_balance
from ....dtensor import IrregularLayout, Mesh
from ..common.treeview import matcher, plain_values

if TYPE_CHECKING:
    from ....checkpoint import Manifest
    from ....checkpoint.files.stored_tensor import StoredTensor


def checkpoint_document(
    url: str, manifest: Manifest, names: tuple[str, ...], *, values: bool
) -> dict[str, Any]:
    """Return everything that ``inspect`` shows.

    ``names`` and ``values`` choose among ``tensors`` and ``values``; all else is of the whole
    checkpoint. ``tree`` is the structure as the manifest states it, left out where less than
    everything was asked for. A tensor's mesh is an index into ``meshes``.
    """
    wanted = matcher(names)
    meshes: dict[Mesh, int] = {}
    tensors = {name: _tensor(tensor, meshes) for name, tensor in manifest.tensors_of_state.items()}
    document: dict[str, Any] = {
        "url": url,
        "format": manifest.format,
        "format_version": manifest.version if manifest.is_ours else None,
        "save_id": manifest.save_id,
        "created": manifest.created,
        "metadata": manifest.metadata,
        "num_tensors": len(tensors),
        "tensor_bytes": sum(tensor.stored_bytes for tensor in manifest.tensors_of_state.values()),
        "num_files": len(manifest.files),
        "file_bytes": sum(record.size for record in manifest.files),
        "balance": {
            "ranks": _balance(rank_balance(manifest)),
            "files": _balance(file_balance(manifest)),
        },
        "meshes": [mesh.to_json() for mesh in meshes],
        "tensors": {name: tensor for name, tensor in tensors.items() if wanted(name)},
        "files": [
            {
                "path": manifest.path_of(record),
                "rank": record.rank,
                "bytes": record.size,
                "data_bytes": record.data_bytes,
                "stored_bytes": record.region_bytes,
            }
            for record in manifest.files
        ],
        "borrowed": [
            {
                "checkpoint": file.source,
                "path": file.path,
                "rank": file.record.rank,
                "bytes": file.record.size,
            }
            for file in manifest.borrowed
        ],
    }
    if values:
        found = plain_values(manifest.tree)
        document["values"] = {name: node for name, node in found if wanted(name)}
    if values and not names:
        document["tree"] = manifest.tree
    return document


def _balance(balance: Balance | None) -> dict[str, Any] | None:
    if balance is None:
        return None
    ratios = {"mean_bytes": balance.mean_bytes, "most_over_mean": balance.most_over_mean}
    return asdict(balance) | ratios


def _tensor(tensor: StoredTensor, meshes: dict[Mesh, int]) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype.torch_name,
        "shape": list(tensor.shape),
        "bytes": tensor.num_bytes,
        "same_as": tensor.same_as,
        "layout": _layout(tensor, meshes),
    }


def _layout(tensor: StoredTensor, meshes: dict[Mesh, int]) -> dict[str, Any]:
    layout = tensor.layout
    if isinstance(layout, IrregularLayout):
        return {"boxes": layout.to_json()["boxes"]}
    return {
        "mesh": meshes.setdefault(layout.mesh, len(meshes)),
        "placements": [str(placement) for placement in layout.placements],
    }
