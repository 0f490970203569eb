"""Reading and setting the seed of a mesh and its count of draws."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypedDict, TypeGuard

from dtckpt.errors import PlacementError

from ..mesh.resolving import AnyMesh, resolve_mesh
from .draws import Noted, draws_of


class RngState(TypedDict):
    """Where the random numbers of a mesh stand; it means the same on every mesh."""

    seed: int
    offset: int


def manual_seed(seed: int, device_mesh: AnyMesh | None = None) -> None:
    """Begin the random numbers of a mesh anew; every rank must pass the same seed.

    A seed has 64 bits, as torch's have: negative ones are those with the highest bit. Raises
    PlacementError for larger ones. The ranks compare seeds at the next draw, which raises
    PlacementError on all of them where they differ.
    """
    if not _is_integer(seed, -(1 << 63), 1 << 64):
        raise PlacementError(f"a seed is an integer of 64 bits, but this is {seed!r}")
    draws_of(resolve_mesh(device_mesh)).restart(seed, 0)


def get_rng_state(device_mesh: AnyMesh | None = None) -> RngState:
    """Return where a mesh stands, for a checkpoint. Every rank of the mesh must call."""
    mesh = resolve_mesh(device_mesh)
    seed, offset = draws_of(mesh).state(mesh)
    return RngState(seed=seed, offset=offset)


def set_rng_state(state: RngState | Mapping[str, int], device_mesh: AnyMesh | None = None) -> None:
    """Continue where ``get_rng_state`` was called, be it on another mesh.

    Every rank must pass the same state. Raises PlacementError where it is none.
    """
    seed, offset = state.get("seed"), state.get("offset")
    if not _is_integer(seed, -(1 << 63), 1 << 64) or not _is_integer(offset, 0, 1 << 63):
        raise PlacementError(
            f"not a state of random numbers: {state!r}; pass what get_rng_state returned, an "
            "integer seed and an offset of 0 or more"
        )
    draws_of(resolve_mesh(device_mesh)).restart(seed, offset)


def _is_integer(number: object, low: int, high: int) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and low <= number < high


def is_rng_supported_mesh(device_mesh: AnyMesh) -> bool:
    """Return whether tensors on a mesh can be filled with random numbers: not on meta devices."""
    return device_mesh.device_type != "meta"


def replayed(
    device_mesh: AnyMesh | None = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts of which the second draws what the first drew, on one mesh.

    For ``torch.utils.checkpoint.checkpoint(..., context_fn=lambda: replayed(mesh))``, which then
    needs no ``preserve_rng_state``.
    """
    mesh = resolve_mesh(device_mesh)
    draws = draws_of(mesh)
    noted: list[Noted] = [(None, 0)]
    return draws.noting(mesh, noted), draws.repeating(noted)
