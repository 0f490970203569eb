"""Every way in which requests of several actors can mix, over a model of a store.

The actors are the real code: ``commit``, ``delete``, ``latest``, ``clean``. An actor is a function
of what the store has answered it so far. So it is run from its beginning with those answers, up to
the first request that has none yet (``next_step``); nothing runs at the same time, and nothing
sleeps. The explorer carries out one request at a time, in every order and with every fault that the
budget allows, and passes over states that it has seen (``explore``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from dtckpt.checkpoint.files.places import MANIFEST
from dtckpt.errors import CheckpointError, ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage import ObjectInfo, ReadRequest, Store, WriteStream

Objects = frozenset[tuple[str, bytes]]
"""Everything that the store holds."""

Op = Literal["read", "list", "publish", "replace", "remove", "delete"]
Fault = Literal["", "refused", "no reply", "late", "repeated", "asked twice", "overtaken"]

FAULTS: dict[Op, tuple[Fault, ...]] = {
    "read": ("refused",),
    "list": ("refused",),
    "publish": ("refused", "no reply", "late", "repeated", "asked twice", "overtaken"),
    "replace": ("refused", "no reply", "late", "repeated", "asked twice", "overtaken"),
    "remove": ("refused", "no reply", "late", "asked twice", "overtaken"),
    "delete": ("refused", "no reply"),
}
"""What can go wrong with a request.

refused      an error, known to have had no effect
no reply     carried out; an error that does not say so
late         an error that does not say so; carried out at any later time, or never
repeated     carried out, and once more at any later time
asked twice  carried out; the reply is lost, and the driver asks again at any later time
overtaken    carried out at any later time, or never; the driver asks again, perhaps before that
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the store."""

    op: Op
    name: str
    data: bytes = b""
    expected: bytes | None = None


Reply = tuple[Literal["ok", "missing", "exists", "refused", "lost"], object]


REPEATED = "repeated"
"""In a reply that is an error: it answers a request that was made before."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Some of the library's code, and what it has been answered."""

    name: str
    history: int = 0
    """What it has been answered so far, as a number; see ``Programs.told``."""
    again: Request | None = None
    """A request whose reply was lost, which the driver is about to repeat."""
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an actor ended."""

    verdict: Literal["ok", "certain", "uncertain"]
    value: object = None


class Pause(BaseException):
    """Raised in an actor at the first request that has not been answered."""


class Tape:
    """The replies that an actor is given; the first request beyond them is kept and breaks off."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.at = 0
        self.pending: Request | None = None
        self._replies = replies

    def ask(self, request: Request) -> object:
        """Return, or raise, the next reply."""
        if self.pending is not None:
            raise Pause  # a process that is gone makes no requests while it unwinds
        if self.at == len(self._replies):
            self.pending = request
            raise Pause
        kind, value = self._replies[self.at]
        self.at += 1
        if kind == "ok":
            return value
        error = {"missing": ObjectNotFound, "exists": ObjectExists}.get(kind, StorageError)(kind)
        # A refusal of a request that was repeated says nothing of the first one.
        error.is_certain = kind != "lost" and value != REPEATED
        raise error


class ReplayStore(Store):
    """A store whose requests go to a tape."""

    old: frozenset[str] = frozenset()
    """Names of objects that were written long ago; all others are of just now."""

    def __init__(self, tape: Tape) -> None:
        self.url = "model:"
        self._prefix = ""
        self._tape = tape

    def _ask(self, op: Op, name: str, data: bytes = b"", expected: bytes | None = None) -> object:
        return self._tape.ask(Request(op, f"{self._prefix}{name}".strip("/"), data, expected))

    def stat(self, name: str) -> ObjectInfo:
        data = self._ask("read", name)
        assert isinstance(data, bytes)
        if name == MANIFEST:  # its size is asked for before each reading: that is one request here
            self._tape.at -= 1
        return ObjectInfo(name, len(data))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self._ask("read", name)
        assert isinstance(data, bytes)
        return data[start:stop]

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        self._ask("publish", name, data, b"any" if overwrite else None)

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        self._ask("replace", name, data, expected)

    def remove(self, name: str, *, expected: bytes) -> None:
        self._ask("remove", name, expected=expected)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._ask("list", prefix)
        assert isinstance(found, tuple)
        skip = len(self._prefix)
        return iter(
            ObjectInfo(name[skip:], size, 0.0 if name in self.old else math.inf)  # pyright: ignore
            for name, size in found  # pyright: ignore
        )

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._ask("delete", name)

    def substore(self, prefix: str) -> Store:
        return self._at(f"{self._prefix}{prefix}/")

    def sibling(self, name: str) -> Store:
        parent = self._prefix.rstrip("/").rpartition("/")[0]
        return self._at(f"{parent}/{name}/".lstrip("/"))

    def _at(self, prefix: str) -> ReplayStore:
        child = ReplayStore(self._tape)
        child.old = self.old
        child._prefix, child.url = prefix, f"model:/{prefix.rstrip('/')}"
        return child

    def create(self, name: str, size: int) -> WriteStream:
        raise NotImplementedError

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> NoReturn:
        raise NotImplementedError


Program = Callable[[Store], object]


class Programs:
    """What the actors run, and how far each comes with the answers it has."""

    def __init__(self, programs: dict[str, Program]) -> None:
        self.programs = programs
        self._known: dict[tuple[str, int], Request | Outcome] = {}
        # Histories are numbered, so that states are small: 0 is the empty one.
        self._replies: list[tuple[Reply, ...]] = [()]
        self._numbers: dict[tuple[int, Reply], int] = {}
        self._asked: dict[tuple[str, int], tuple[Request, ...]] = {}

    def told(self, history: int, reply: Reply) -> int:
        """Return the number of a history with one more reply."""
        key = (history, reply)
        if key not in self._numbers:
            self._numbers[key] = len(self._replies)
            self._replies.append((*self._replies[history], reply))
        return self._numbers[key]

    def last_reply(self, actor: Actor) -> str:
        """Return the kind of the last reply."""
        return self._replies[actor.history][-1][0]

    def asked(self, actor: Actor) -> tuple[Request, ...]:
        """Return all requests of an actor so far."""
        key = (actor.name, actor.history)
        if key not in self._asked:
            history, found = 0, list[Request]()
            for reply in self._replies[actor.history]:
                step = self.next_step(Actor(actor.name, history))
                assert isinstance(step, Request)
                found.append(step)
                history = self.told(history, reply)
            self._asked[key] = tuple(found)
        return self._asked[key] if actor.again is None else (*self._asked[key], actor.again)

    def next_step(self, actor: Actor) -> Request | Outcome:
        """Return the actor's next request, or how it has ended."""
        key = (actor.name, actor.history)
        if key not in self._known:
            self._known[key] = self._run(actor)
        return self._known[key]

    def _run(self, actor: Actor) -> Request | Outcome:
        tape = Tape(self._replies[actor.history])
        try:
            value = self.programs[actor.name](ReplayStore(tape))
        except Pause:
            assert tape.pending is not None
            return tape.pending
        except CheckpointError as error:
            return Outcome("certain" if error.is_certain else "uncertain", error)
        assert tape.pending is None, "an actor must not swallow its own end"
        return Outcome("ok", value)


def carry_out(objects: Objects, request: Request) -> tuple[Objects, Reply]:
    """Return what the store holds after a request, and its reply."""
    held = dict(objects)
    there = held.get(request.name)
    if request.op == "read":
        return objects, ("missing", None) if there is None else ("ok", there)
    if request.op == "list":
        below = f"{request.name}/" if request.name else ""
        return objects, (
            "ok",
            tuple(sorted((n, len(d)) for n, d in objects if n.startswith(below))),
        )
    if request.op == "publish" and request.expected is None and there is not None:
        return objects, ("exists", None)
    if request.op in ("replace", "remove") and there is None:
        return objects, ("missing", None)
    if request.op in ("replace", "remove") and there != request.expected:
        return objects, ("exists", None)
    if request.op in ("remove", "delete"):
        held.pop(request.name, None)
    else:
        held[request.name] = request.data
    return frozenset(held.items()), ("ok", None)


def _as_repeated(reply: Reply) -> Reply:
    return reply if reply[0] == "ok" else (reply[0], REPEATED)


@dataclass(frozen=True, slots=True)
class State:
    """Where everybody is."""

    objects: Objects
    actors: tuple[Actor, ...]
    pending: tuple[Request, ...] = ()
    """Requests that may yet be carried out, answered long since."""
    faults: int = 0
    """How many more may happen."""


class Explorer:
    """Goes through every state that can be reached, and has each one looked at."""

    def __init__(
        self, programs: Programs, look: Callable[[State, dict[str, Outcome]], None]
    ) -> None:
        self._programs = programs
        self._look = look
        self._same: dict[Objects, Objects] = {}
        self.num_states = 0

    def explore(self, start: State) -> None:
        """Visit all states; ``look(state, outcomes)`` raises where something is wrong."""
        seen = {start}
        waiting = [start]
        before: dict[State, State] = {}
        while waiting:
            state = waiting.pop()
            outcomes = self._outcomes(state)
            try:
                self._look(state, outcomes)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._story(state, before)}") from error
            for after in self._after(state):
                if after not in seen:
                    seen.add(after)
                    before[after] = state
                    waiting.append(after)
        self.num_states = len(seen)

    def _outcomes(self, state: State) -> dict[str, Outcome]:
        steps = {a.name: self._programs.next_step(a) for a in state.actors if not a.dead}
        return {name: step for name, step in steps.items() if isinstance(step, Outcome)}

    def _after(self, state: State) -> Iterator[State]:
        for at, actor in enumerate(state.actors):
            for objects, new, pending, faults in self._steps(state, actor):
                actors = (*state.actors[:at], new, *state.actors[at + 1 :])
                kept = tuple(sorted((*state.pending, *pending), key=repr))
                yield State(objects, actors, kept, state.faults - faults)
        for request in dict.fromkeys(state.pending):
            rest = list(state.pending)
            rest.remove(request)
            objects, _ = carry_out(state.objects, request)
            yield replace(state, objects=objects, pending=tuple(rest))

    def _steps(
        self, state: State, actor: Actor
    ) -> Iterator[tuple[Objects, Actor, tuple[Request, ...], int]]:
        """Yield what the next step of one actor can lead to."""
        if actor.dead:
            return
        request = actor.again or self._programs.next_step(actor)
        if isinstance(request, Outcome):
            return
        after, reply = carry_out(state.objects, request)
        after = self._same.setdefault(after, after)
        if actor.again is not None:
            reply = _as_repeated(reply)

        def told(reply: Reply) -> Actor:
            return Actor(actor.name, self._programs.told(actor.history, reply))

        yield after, told(reply), (), 0
        if actor.again is not None or not state.faults:
            return
        yield state.objects, replace(actor, dead=True), (), 1
        for fault in FAULTS[request.op]:
            if fault == "refused":
                yield state.objects, told(("refused", None)), (), 1
            elif fault == "no reply":
                yield after, told(("lost", None)), (), 1
            elif fault == "late":
                yield state.objects, told(("lost", None)), (request,), 1
            elif fault == "repeated":
                yield after, told(_as_repeated(reply)), (request,), 1
            elif fault == "asked twice":
                yield after, replace(actor, again=request), (), 1
            elif fault == "overtaken":
                yield state.objects, replace(actor, again=request), (request,), 1

    def _story(self, state: State, before: dict[State, State]) -> str:
        """Return what led to a state, one line a step."""
        steps = [state]
        while steps[-1] in before:
            steps.append(before[steps[-1]])
        lines: list[str] = []
        for old, new in zip(steps[::-1], steps[-2::-1], strict=False):
            lines.append(self._line(old, new))
        return "\n".join([*lines, f"there: {sorted(name for name, _ in state.objects)}"])

    def _line(self, old: State, new: State) -> str:
        for a, b in zip(old.actors, new.actors, strict=True):
            if a != b:
                asked = a.again or self._programs.next_step(a)
                assert isinstance(asked, Request)
                told = (
                    "is killed"
                    if b.dead
                    else self._programs.last_reply(b)
                    if not b.again
                    else "asks again"
                )
                effect = "" if old.objects == new.objects else " (carried out)"
                left = " (one more to come)" if len(new.pending) > len(old.pending) else ""
                return f"  {a.name}: {asked.op} {asked.name} -> {told}{effect}{left}"
        (request,) = [r for r in old.pending if old.pending.count(r) > new.pending.count(r)][:1]
        return f"  late: {request.op} {request.name}"
