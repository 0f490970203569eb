"""Where ranks leave word for each other beside the training: the store of their process group.

Nothing is waited for inside of the store: a client of a ``TCPStore`` serves one thread at a time,
and the training needs it, too.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from dtckpt.addresses import listen
from dtckpt.errors import CheckpointError

from ..ranks.together import Answers, closing, ranks_of, together

NOTHING = ""
"""The word of a turn that nobody has begun."""

_TCPStore: Any = dist.__dict__["TCPStore"]  # torch's stubs leave it out
_CONNECT = timedelta(seconds=10)
_OWN_STORE = "agreement store"


class GroupGone(Exception):
    """The process group does not exist any more."""


class Register:
    """Turns, each with one word that moves on in single steps and a note by each rank."""

    def __init__(self, store: Callable[[], Any], name: str) -> None:
        """``store`` returns it, or raises GroupGone; ``name`` is nobody else's."""
        self._store = store
        self._name = name

    def word(self, turn: int) -> str:
        """Return the word of a turn."""
        store, key = self._store(), self._key(turn)
        return _text(store.get(key)) if store.check([key]) else NOTHING

    def move(self, turn: int, expected: str, new: str) -> str:
        """Replace the word if it is the expected one, in one step; return what it is then."""
        return _text(self._store().compare_set(self._key(turn), expected, new))

    def arrive(self, turn: int, what: str) -> int:
        """Count a rank that has come to a part of a turn; return how many have."""
        return int(self._store().add(self._key(turn, what), 1))

    def note(self, turn: int, rank: int, text: str) -> None:
        """Leave a note of one rank."""
        self._store().set(self._key(turn, rank), text)

    def notes(self, turn: int, ranks: Sequence[int]) -> list[str]:
        """Return the notes of ranks that have all left one."""
        store, keys = self._store(), [self._key(turn, rank) for rank in ranks]
        found = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        return [_text(each) for each in found]

    def note_of(self, turn: int, rank: int) -> str:
        """Return the note of a rank; empty if it has left none."""
        store, key = self._store(), self._key(turn, rank)
        return _text(store.get(key)) if store.check([key]) else ""

    def forget(self, turn: int, names: Iterable[object]) -> None:
        """Delete what belongs to a turn that all ranks have left; ``""`` is its word."""
        store = self._store()
        with suppress(NotImplementedError):  # some stores keep everything
            for name in names:
                store.delete_key(self._key(turn, name))

    def _key(self, turn: int, name: object = "") -> str:
        return f"{self._name}/{turn}/{name}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of one agreement talk."""

    ranks: tuple[int, ...]
    """Global numbers, in the order of the group."""
    index: int
    """Of this rank among them."""
    register: Register | None
    """None for a rank that is alone."""


def meet(process_group: Any, *, no_dist: bool, timeout: timedelta) -> Place:
    """Have all ranks of a group agree on a place; a call of the group like a save.

    The name is a random one, so nothing that another group of this name has left is taken for ours.
    """
    ranks = ranks_of(process_group, no_dist=no_dist, timeout=timeout, purpose="agreement")
    group = process_group
    if group is None and len(ranks.all) > 1:
        group = dist.group.WORLD

    def choose(_: Answers) -> bytes:
        address = None
        if len(ranks.all) > 1 and _store_of(group) is None:
            address = _open_store(ranks.memory)
        name = f"dtckpt/agreement/{secrets.token_hex(8)}"
        return json.dumps({"name": name, "store": address}).encode()

    def reach() -> bytes:
        _connect(ranks.memory, address)
        return b""

    with closing(ranks):
        chosen = json.loads(together(ranks, "agreement: begin", lambda: b"", choose))
        address = chosen["store"]
        if address is not None:
            together(ranks, "agreement: reach its store", reach)
    index = ranks.all.index(ranks.rank)
    if len(ranks.all) == 1:
        return Place(ranks.all, index, None)
    find = _finder(group) if address is None else partial(_opened, ranks.memory)
    return Place(ranks.all, index, Register(find, chosen["name"]))


def _store_of(group: Any) -> Any:
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def _finder(group: Any) -> Callable[[], Any]:
    """Return what finds the store of a group, and keeps neither."""
    held = weakref.ref(group)

    def find() -> Any:
        found = held()
        if found is None:
            raise GroupGone
        return _store_of(found)

    return find


def _opened(memory: dict[str, Any]) -> Any:
    return memory[_OWN_STORE][1]


def _open_store(memory: dict[str, Any]) -> tuple[str, int]:
    """Open a store for a group that has none, unless it is open; others of the group share it."""
    if _OWN_STORE not in memory:
        hosts, sockets = listen(1)
        address = hosts[0], int(sockets[0].getsockname()[1])
        for other in sockets[1:]:
            other.close()
        descriptor = sockets[0].detach()
        store = _TCPStore(*address, None, True, _CONNECT, False, master_listen_fd=descriptor)
        memory[_OWN_STORE] = address, store
    return memory[_OWN_STORE][0]


def _connect(memory: dict[str, Any], address: Sequence[Any]) -> None:
    """Connect to the store that the coordinator has opened."""
    host, port = address
    if _OWN_STORE in memory and memory[_OWN_STORE][0] == (host, port):
        return
    try:
        memory[_OWN_STORE] = (host, port), _TCPStore(host, port, None, False, _CONNECT)
    except RuntimeError as error:
        raise CheckpointError(
            f"the store that the first rank has opened at {host}:{port} cannot be reached: {error}"
        ) from error
