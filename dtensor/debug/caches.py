"""What is remembered of calls: how much it is, and that it may all be forgotten."""

from __future__ import annotations

from ..comm.caches import caches
from ..mesh.device_mesh import DeviceMesh


def cache_sizes(mesh: DeviceMesh | None = None) -> dict[str, int]:
    """Return how many entries every cache of a mesh has, by name; without one, all in the process.

    Of a mesh, ``quick_calls`` are calls of operators, ``plans`` what was found out for their kinds,
    ``redistribute_plans`` ways from one layout to another, ``joint_plans`` those of several tensors
    together, ``list_norms`` what is done for lists of gradients, ``gradient_targets`` where they
    go, and ``specs`` layouts that tensors had. Caches without entries are left out.
    """
    found: dict[str, int] = {}
    for cache in caches() if mesh is None else mesh.caches():
        found[cache.name] = found.get(cache.name, 0) + len(cache)
    return {name: size for name, size in sorted(found.items()) if size}


def clear_caches(mesh: DeviceMesh | None = None) -> None:
    """Clear every cache of a mesh, or all in the process: as if no operator had been called."""
    for cache in caches() if mesh is None else mesh.caches():
        cache.clear()
