"""Small objects that all agents hold, and of which one writer at a time is the first.

Writers ask the agents in the order of their hosts' names. The first of them that answers, or that
holds what is to be replaced, decides which of several writers wins; the others follow it. Stamps
tell the newest of an object from older ones that an agent may hold which missed something.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError
from dtckpt.logs import logger_of

from ..failures import already_exists, changed, failing, not_found
from .agent.generations import COMMIT_NAME, parent
from .client import Lost, Peer
from .crew import Crew
from .places import Place

logger = logger_of("storage")


class Publisher:
    """Puts objects into the memory of all agents that answer."""

    def __init__(self, crew: Crew, copies: int, keep: int) -> None:
        self._crew = crew
        self._copies = copies
        self._keep = keep

    def put(self, where: str, key: str, data: bytes, *, above: int, is_new: bool) -> None:
        """Publish an object; ``is_new`` raises ObjectExists if there is one."""
        living = self._crew.living(listed_now=True)
        first, stamp = None, 0
        for peer in living:
            try:
                stamp = self._put(peer, key, data, stamp=None, above=above, is_new=is_new)
            except ObjectExists as error:
                with failing(certain=True):
                    raise already_exists(where) from error
            except Lost as error:
                logger.warning("%s: %s", where, error)
            else:
                first = peer
                break
        if first is None:
            raise StorageError(f"cannot publish {where}: no agent answers")
        self._follow(where, key, data, stamp, living, [first], is_new=is_new)

    def swap(self, where: str, place: Place, data: bytes) -> None:
        """Publish in place of an object as it was found; ObjectExists if it was replaced."""
        stamp, first = self._swapped(where, place, data)
        living = self._crew.living(listed_now=True)
        self._follow(where, place.key, data, stamp, living, [first], is_new=False)

    def remove(self, where: str, place: Place) -> None:
        """Delete an object as it was found; ObjectExists if it was replaced."""
        self._swapped(where, place, None)
        self._crew.ask_all("delete", names=[place.key], up_to=place.stamp)

    def _swapped(self, where: str, place: Place, data: bytes | None) -> tuple[int, Peer]:
        request = {"name": place.key, "stamp": place.stamp, "removes": data is None}
        for peer in sorted(place.peers, key=lambda peer: peer.host):
            try:
                return int(peer.ask("swap", data or b"", **request)[0]["stamp"]), peer
            except ObjectExists as error:
                with failing(certain=True):
                    raise changed(where) from error
            except ObjectNotFound as error:
                with failing(certain=True):
                    raise not_found(where) from error
            except Lost as error:
                logger.warning("%s: %s", where, error)
        raise StorageError(f"cannot replace {where}: no agent that holds it answers")

    def _follow(
        self,
        where: str,
        key: str,
        data: bytes,
        stamp: int,
        living: Iterable[Peer],
        taken: list[Peer],
        *,
        is_new: bool,
    ) -> None:
        """Give all others what the first agent has taken; then older checkpoints may go."""
        others = [peer for peer in living if peer not in taken]
        wanted = min(self._copies, len(others) + len(taken))
        failures: list[str] = []
        for peer in others:
            try:
                self._put(peer, key, data, stamp=stamp, above=0, is_new=is_new)
            except ObjectExists as error:
                self._crew.ask(taken, "delete", names=[key], up_to=stamp)
                raise already_exists(where) from error
            except StorageError as error:
                logger.warning("%s: %s", where, error)
                failures.append(str(error))
            else:
                taken.append(peer)
        if len(taken) < wanted:
            raise StorageError(
                f"{where} was to be held by {wanted} hosts, and is by {len(taken)}: "
                f"{'; '.join(failures)}"
            )
        if key.rpartition("/")[2] == COMMIT_NAME:
            self._retire(taken, parent(key))

    def _retire(self, peers: Iterable[Peer], directory: str) -> None:
        """Let agents give older checkpoints up, now that enough of them hold a newer one."""
        try:
            self._crew.ask(peers, "retire", directory=directory, keep=self._keep)
        except StorageError as error:
            logger.warning("%s: older checkpoints stay in memory: %s", directory, error)

    def _put(
        self, peer: Peer, key: str, data: bytes, *, stamp: int | None, above: int, is_new: bool
    ) -> int:
        answer, _ = peer.ask("put", data, name=key, stamp=stamp, above=above, is_new=is_new)
        return int(answer["stamp"])
