"""All agents of a job: which there are, which of them live, and asking them at the same time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from dtckpt.errors import StorageError
from dtckpt.logs import logger_of

from .client import Address, Lost, Peer
from .job import Job, address_of
from .registry import Registry
from .starting import ensure_agent

logger = logger_of("storage")

_LISTED_SECONDS = 2.0
"""For so long what the registry has said is believed."""


class Crew:
    """The agents of a job; any thread may use it, and connections are kept from call to call."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.own = Peer(job, (f"{job.stem}.sock",), job.host)
        """That of this host, which may not have been started."""
        self._others: dict[tuple[Address, ...], Peer] = {}
        self._listed_until = 0.0
        self._lock = threading.RLock()  # a finalizer may come in between
        self._starting = threading.RLock()

    def living(self, *, listed_now: bool = False) -> list[Peer]:
        """Return the agents that answer, by the names of their hosts; each host has one.

        ``listed_now`` finds those that have come a moment ago, too. StorageError if there are some
        agents, and none answers.
        """
        if listed_now:
            self._listed_until = 0.0
        others = self._known()
        _side_by_side(partial(_reach, peer) for peer in others if peer.refusal is None)
        found = {self.own.host: self.own} if self.own.is_living() else {}
        for peer in others:
            if peer.is_living() and peer.host != self.job.host:
                found.setdefault(peer.host, peer)
        if not found and (silent := [peer for peer in others if peer.host != self.job.host]):
            raise StorageError(
                f"no agent of the job {self.job.name!r} answers: "
                + "; ".join(str(peer.refusal or peer.where) for peer in silent)
            )
        return [found[host] for host in sorted(found)]

    def beside_own(self) -> list[Peer]:
        """Return the agents of other hosts that answer now, from the one after this host's on."""
        living = self.living(listed_now=True)
        own = self.job.host
        return [p for p in living if p.host > own] + [p for p in living if p.host < own]

    def silent(self) -> str:
        """Return who of the agents does not answer, for messages; empty if all do."""
        silent = [peer.where for peer in self._known() if peer.refusal and not peer.is_own]
        return f"; agents that do not answer: {', '.join(sorted(silent))}" if silent else ""

    def start_own(self, budget_bytes: int) -> Peer:
        """Return the agent of this host, started if it is missing."""
        with self._starting:
            try:
                self.own.ask("status")
            except Lost:
                ensure_agent(self.job, budget_bytes=budget_bytes)
                self.own.ask("status")
        return self.own

    def ask_all(self, op: str, **fields: Any) -> dict[Peer, dict[str, Any]]:
        """Ask all agents that live; StorageError if there are some, and none answers."""
        answers: dict[Peer, dict[str, Any]] = {}
        while not answers and (living := self.living()):
            answers = self.ask(living, op, **fields)
        return answers

    def ask(
        self, peers: Iterable[Peer], op: str, payload: bytes = b"", **fields: Any
    ) -> dict[Peer, dict[str, Any]]:
        """Ask agents at the same time and return the answers of those that have not been lost."""
        begun: list[tuple[Peer, Any]] = []
        for peer in peers:
            try:
                begun.append((peer, peer.begin(op, payload, **fields)))
            except Lost as error:
                logger.warning("%s", error)
        answers: dict[Peer, dict[str, Any]] = {}
        failure: StorageError | None = None
        for peer, channel in begun:  # every answer is taken, whatever the others are
            try:
                answers[peer] = peer.finish(channel, op, payload, **fields)[0]
            except Lost as error:
                logger.warning("%s", error)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def _known(self) -> list[Peer]:
        """Return the agents of other hosts, as far as they have been told of."""
        with self._lock:
            if time.monotonic() >= self._listed_until:
                self._list()
                self._listed_until = time.monotonic() + _LISTED_SECONDS
            return list(self._others.values())

    def _list(self) -> None:
        told: dict[tuple[Address, ...], str] = {(address_of(a),): "" for a in self.job.agents}
        if self.job.registry:
            for entry in Registry(self.job.registry, self.job.name).entries():
                if entry.host != self.job.host and entry.addresses:
                    told[entry.addresses] = entry.host
        self._others = {
            addresses: self._others.get(addresses) or Peer(self.job, addresses, host)
            for addresses, host in told.items()
        }


_crews: dict[Job, Crew] = {}
_crews_lock = threading.RLock()


def crew_of(job: Job) -> Crew:
    """Return the agents of a job, the same for all stores of this process."""
    with _crews_lock:
        return _crews.setdefault(job, Crew(job))


def _forget_in_child() -> None:
    global _crews_lock
    _crews_lock = threading.RLock()  # another thread of the parent may have held it
    _crews.clear()  # two processes on one connection would read each other's answers


os.register_at_fork(after_in_child=_forget_in_child)


def _reach(peer: Peer) -> None:
    try:
        peer.is_living()
    except StorageError:
        return  # told again where it is asked for


def _side_by_side(calls: Iterable[partial[None]]) -> None:
    """Call all at the same time: hosts that have gone take seconds each."""
    listed = list(calls)
    threads: list[threading.Thread] = []
    for call in listed[1:]:
        thread = threading.Thread(target=call, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            call()
        else:
            threads.append(thread)
    for call in listed[:1]:
        call()
    for thread in threads:
        thread.join()
