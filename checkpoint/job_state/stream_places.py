"""Which saved state a generator goes on with, or how it begins anew, at a coordinate of a mesh.

Along an axis on which all saved states were the same they stay the same, whatever its size is now;
along the others every coordinate has a stream of its own. A coordinate that was there goes on with
its own state. One that is new begins with a seed that is a function of what was saved and of the
coordinate; two of them never have the same, for which 32 bits are compared, as torch's generator of
the CPU takes no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from ...dtensor.geometry.mesh import Mesh
from ..state.coordinates import Coordinate, Dealing

_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class GoesOn:
    """A stream takes the state of a saved coordinate."""

    source: Coordinate


@dataclass(frozen=True, slots=True)
class Begins:
    """A stream begins anew."""

    seed: int
    """Of 64 bits."""


def place_of_stream(
    name: str, dealing: Dealing, digests: Mapping[Coordinate, str], *, repeats: bool = False
) -> GoesOn | Begins | None:
    """Return what a stream does at this rank's coordinate; None where no state of it was saved.

    ``digests`` are hashes of the states of this stream by their saved coordinates. With ``repeats``
    coordinates that are new take the states of those that were there, in turn.

    >>> dealing = Dealing(saved=Mesh((2,), ("dp",)), wanted=Mesh((4,), ("dp",)), coordinate=(3,))
    >>> place_of_stream("cpu", dealing, {(0,): "a", (1,): "a"})
    GoesOn(source=(1,))
    >>> type(place_of_stream("cpu", dealing, {(0,): "a", (1,): "b"})).__name__
    'Begins'
    """
    if not digests:
        return None
    saved, wanted = dealing.saved, dealing.wanted
    shared = {
        axis for axis in saved.axis_names if repeats or _is_alike(saved, saved.axis(axis), digests)
    }
    here = dict(zip(wanted.axis_names, dealing.coordinate, strict=True))
    sizes = dict(zip(saved.axis_names, saved.shape, strict=True))
    source = tuple(
        here.get(axis, 0) % size if axis in shared else here.get(axis, 0)
        for axis, size in sizes.items()
    )
    was_there = repeats or all(
        i < sizes.get(axis, 1) for axis, i in here.items() if axis not in shared
    )
    if was_there and source in digests:
        return GoesOn(source)
    own = tuple(0 if axis in shared else i for axis, i in here.items())
    first = digests[min(digests)]
    return Begins(_seed(f"{name}:{first}", _index(wanted, own)))


def _is_alike(mesh: Mesh, axis: int, digests: Mapping[Coordinate, str]) -> bool:
    """Whether states do not differ along an axis of several coordinates."""
    if mesh.shape[axis] == 1:
        return False
    lines: dict[Coordinate, str] = {}
    return len(digests) == math.prod(mesh.shape) and all(
        lines.setdefault((*at[:axis], *at[axis + 1 :]), digest) == digest
        for at, digest in digests.items()
    )


def _index(mesh: Mesh, coordinate: Coordinate) -> int:
    index = 0
    for i, size in zip(coordinate, mesh.shape, strict=True):
        index = index * size + i
    return index


def _seed(text: str, index: int) -> int:
    """Return a seed whose lower half is another one for every index below 2^32."""
    base = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    own = blake2b(f"{text}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(own, "little") << 32 | (base + index) & _LOW


DigestsOf = Callable[[Coordinate], Mapping[str, str]]
"""Returns the hashes of what was saved at a coordinate, by the names of streams."""


def digests_by_stream(saved: Mesh, digests_of: DigestsOf) -> dict[str, dict[Coordinate, str]]:
    """Return the hashes of every stream by coordinate."""
    found: dict[str, dict[Coordinate, str]] = {}
    for coordinate in saved.coordinates():
        for name, digest in digests_of(coordinate).items():
            found.setdefault(name, {})[coordinate] = digest
    return found
