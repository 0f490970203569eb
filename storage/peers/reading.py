"""Reading an object from any agent that holds it: out of its memory, or over a socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtckpt.errors import ObjectNotFound, StorageError

from ..base import ReadRequest
from ..failures import out_of_range
from .client import Lost, Peer
from .opened import OpenedObjects
from .places import Place, Places

_MAX_RANGES = 1024
"""Asked for in one message."""


class Replaced(StorageError):
    """An object is not the one any more that it was when it was looked for."""


def read_object(
    where: str,
    key: str,
    requests: Sequence[ReadRequest],
    places: Places,
    opened: OpenedObjects,
    at: Place | None = None,
) -> Iterator[ReadRequest]:
    """Fill buffers and yield each when it is filled; who is lost is replaced by another agent.

    StorageError that names the agents where none is left, ``Replaced`` where the object is not the
    one any more that it was when the call began, or ``at``.
    """
    left = {id(request): request for request in requests}
    lost: list[StorageError] = []
    tried: set[Peer] = set()
    place = at or places.known(key)
    first = place
    while True:
        if place is None or first is None:
            raise places.missing(where, lost)
        if place.stamp != first.stamp:
            raise Replaced(f"cannot read {where}: it was replaced meanwhile")
        for request in requests:
            if request.view.nbytes and request.stop > place.size:
                raise out_of_range(where, request.offset, request.stop, place.size)
        untried = [peer for peer in place.peers if peer not in tried]
        if not untried:
            raise StorageError(f"cannot read {where}: {'; '.join(map(str, lost))}")
        tried.add(untried[0])
        try:
            for request in _filled(untried[0], place, list(left.values()), opened):
                del left[id(request)]
                yield request
        except (Lost, ObjectNotFound) as error:
            lost.append(error)
            place = places.find(key)
        else:
            return


def _filled(
    peer: Peer, place: Place, requests: Sequence[ReadRequest], opened: OpenedObjects
) -> Iterator[ReadRequest]:
    if not peer.is_own:
        return _received(peer, place, requests)
    found = opened.get(peer, place.key, place.stamp)
    if found.stamp != place.stamp:
        raise Replaced(f"{place.key} was replaced at {peer.where} before it was read")
    return found.fill(requests)


def _received(peer: Peer, place: Place, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
    """Fill buffers over a connection, in the order of their bytes."""
    ordered = sorted(requests, key=lambda request: request.offset)
    for start in range(0, len(ordered), _MAX_RANGES):
        part = ordered[start : start + _MAX_RANGES]
        ranges = [(r.offset, r.stop) if r.view.nbytes else (0, 0) for r in part]
        with peer.channel() as channel:
            channel.send({"op": "read", "name": place.key, "ranges": ranges})
            message = peer.checked(channel.receive())
            if message.fields["stamp"] != place.stamp:
                raise Replaced(f"{place.key} was replaced at {peer.where} before it was read")
            for request in part:
                channel.fill(request.view)
                yield request
