"""A row of numbers from every coordinate of a mesh."""

from __future__ import annotations

import itertools
import struct

from ..comm.collectives import all_gather_ints
from ..comm.traffic import asking
from .device_mesh import DeviceMesh


def gather_rows(row: list[int], mesh: DeviceMesh) -> dict[tuple[int, ...], list[int]]:
    """Return the ints of every coordinate, as many from each."""
    device, table = mesh.device, row
    with asking("agreement"):
        for axis in reversed(range(mesh.ndim)):
            if mesh.shape[axis] > 1:
                rows = all_gather_ints(table, mesh.peers((axis,)), device)
                table = list(itertools.chain.from_iterable(rows))
    found = [table[i : i + len(row)] for i in range(0, len(table), len(row))]
    return dict(zip(mesh.layout_mesh.coordinates(), found, strict=True))


def gather_floats(row: list[float], mesh: DeviceMesh) -> dict[tuple[int, ...], list[float]]:
    """Return the floats of every coordinate, to the last bit, as many from each."""
    floats, ints = f"={len(row)}d", f"={len(row)}q"
    rows = gather_rows(list(struct.unpack(ints, struct.pack(floats, *row))), mesh)
    return {at: list(struct.unpack(floats, struct.pack(ints, *bits))) for at, bits in rows.items()}
