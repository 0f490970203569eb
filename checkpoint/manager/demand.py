"""A save that another process asks for, by a small object in the root of the run.

The object lists who asks and who has been answered. Each change of it is made in place of what was
read, so of several who write at the same time none undoes what another one has done.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from dtckpt.errors import (
    CheckpointError,
    Corrupt,
    NotCommitted,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    Timeout,
)
from dtckpt.logs import logger_of

from ...storage.base import Store
from ...storage.open import open_store

logger = logger_of("checkpoint")

SAVE_NOW = "save-now.json"
"""The object's name, in the root of a run."""

_MAX_BYTES = 1 << 20
_ATTEMPTS = 50
_LOOK_SECONDS = 0.5
_KEEP_SECONDS = 3600.0
"""How long an answer is kept for somebody who has not come for it."""
_JOIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody who asks for a save."""

    id: str
    time: float
    """In seconds since 1970."""
    waits: bool
    """Whether somebody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What has become of a request."""

    id: str
    time: float
    url: str
    """Of the checkpoint; empty if there is none."""
    problem: str


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for and what has been answered."""

    requests: tuple[Request, ...] = ()
    answers: tuple[Answer, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() if self.requests or self.answers else b""

    @classmethod
    def from_bytes(cls, data: bytes) -> Demand:
        """Raises ValueError, KeyError or TypeError for what is no demand."""
        if not data:
            return cls()
        value: dict[str, Any] = json.loads(data)
        return cls(
            tuple(Request(**each) for each in value["requests"]),
            tuple(Answer(**each) for each in value["answers"]),
        )

    def answered(self, ids: Iterable[str], url: str, problem: str, now: float) -> Demand:
        """Return what is left once some requests are answered."""
        done = frozenset(ids)
        fresh = [each for each in self.answers if now - each.time < _KEEP_SECONDS]
        fresh += [
            Answer(r.id, now, url, problem) for r in self.requests if r.id in done and r.waits
        ]
        return Demand(tuple(r for r in self.requests if r.id not in done), tuple(fresh))


def request_save(
    root: str | os.PathLike[str] | Store,
    *,
    wait: timedelta | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Ask the training that saves into ``root`` for a checkpoint of the step that it is at.

    From any process that can write there. Its manager looks every few seconds, and all ranks save
    at the next call that they can agree on. With ``wait`` this returns the checkpoint's URL once it
    is committed; else None, at once.

    Raises Timeout if there is no answer in time, in which case the request stands; CheckpointError
    if the save failed; NotCommitted if there is no such directory; StorageError.
    """
    store = open_store(root, **dict(storage_options or {}))
    if os.path.isabs(store.url) and not os.path.isdir(store.url):
        raise NotCommitted(f"{store.url}: no run saves here: there is no such directory")
    request = Request(secrets.token_hex(8), time.time(), wait is not None)

    def add(demand: Demand) -> Demand:
        return replace(demand, requests=(*demand.requests, request))

    _update(store, add)
    return None if wait is None else _wait_for(store, request, wait, add)


def _wait_for(
    store: Store, request: Request, wait: timedelta, add: Callable[[Demand], Demand]
) -> str:
    limit = time.monotonic() + wait.total_seconds()
    while time.monotonic() < limit:
        time.sleep(min(_LOOK_SECONDS, max(limit - time.monotonic(), 0.0)))
        demand = Demand.from_bytes(_read(store))
        answer = next((each for each in demand.answers if each.id == request.id), None)
        if answer is not None:
            _update(store, lambda now: _without(now, request.id))
            if answer.problem:
                raise CheckpointError(f"{store.url}: the save failed: {answer.problem}")
            return answer.url
        if all(each.id != request.id for each in demand.requests):
            _update(store, add)  # undone by another writer, where the store cannot compare
    raise Timeout(
        f"{store.url}: no save was made on demand within {wait.total_seconds():g} s; the request "
        "stands. Does a training with a manager run, and call it?"
    )


def _without(demand: Demand, id_: str) -> Demand:
    return replace(demand, answers=tuple(each for each in demand.answers if each.id != id_))


def _read(store: Store) -> bytes:
    try:
        data = store.read(SAVE_NOW)
    except ObjectNotFound:
        return b""
    if len(data) > _MAX_BYTES:
        raise Corrupt(
            f"{store.url}/{SAVE_NOW}: {len(data)} bytes are no list of requests; delete it"
        )
    return data


def _update(store: Store, change: Callable[[Demand], Demand]) -> None:
    """Replace the object by what ``change`` makes of it; it is deleted where nothing is left."""
    for _ in range(_ATTEMPTS):
        old = _read(store)
        try:
            new = change(Demand.from_bytes(old)).to_bytes()
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(
                f"{store.url}/{SAVE_NOW} is no list of requests for a save ({error}); delete it"
            ) from None
        try:
            if new == old:
                return
            if not old:
                store.publish(SAVE_NOW, new, overwrite=False)
            elif not new:
                store.remove(SAVE_NOW, expected=old)
            else:
                store.replace(SAVE_NOW, new, expected=old)
            return
        except (ObjectExists, ObjectNotFound):
            time.sleep(secrets.randbelow(50) / 1000)  # somebody else was first
    raise StorageError(f"{store.url}/{SAVE_NOW}: others change it all the time")


class DemandWatch:
    """Looks for requests in the root of a run, on one rank of it, in a thread."""

    def __init__(
        self, store: Store, ask: Callable[[str], None], poll: timedelta = timedelta(seconds=5)
    ) -> None:
        """``ask`` is called with a reason when there are requests that were not there before."""
        self._store = store
        self._ask = ask
        self._poll = poll.total_seconds()
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}
        self._known: frozenset[str] = frozenset()
        self._problem = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dtckpt-demand", daemon=True)
        self._thread.start()

    def begin_save(self) -> tuple[str, ...]:
        """Return which requests a save answers that begins now."""
        with self._lock:
            found = tuple(self._seen)
            self._seen.clear()
        return found

    def answer(self, requests: tuple[str, ...], url: str = "", problem: str = "") -> None:
        """Tell what has become of requests: the checkpoint's URL once it is committed, or why not.

        A storage that fails is logged; nobody waits for it.
        """
        if not requests:
            return
        try:
            _update(self._store, lambda now: now.answered(requests, url, problem, time.time()))
        except CheckpointError as error:
            logger.warning("who has asked for a save is not told that it is there: %s", error)

    def close(self) -> None:
        """End it; requests that are not answered stand. Waits for no storage that hangs."""
        self._ends.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        with suppress(OSError):  # whoever asks before the first save is to find the directory
            if os.path.isabs(self._store.url):
                os.makedirs(self._store.url, exist_ok=True)
        while not self._ends.is_set():
            self._look()
            self._ends.wait(self._poll)

    def _look(self) -> None:
        try:
            demand = Demand.from_bytes(_read(self._store))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                logger.warning("%s: requests for a save are not seen: %s", self._store.url, problem)
            self._problem = problem
            return
        self._problem = ""
        ids = frozenset(request.id for request in demand.requests)
        new = [request.id for request in demand.requests if request.id not in self._known]
        self._known = ids
        if new:
            with self._lock:
                self._seen.update(dict.fromkeys(new))
            self._ask("on demand")
