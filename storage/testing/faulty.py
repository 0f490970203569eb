"""A store that fails on purpose, to prove that what is built on stores survives it.

``FaultyStore`` wraps any store. Every call on it, its substores and its streams is numbered, logged
and shown to a plan, which may answer with a fault::

    store = FaultyStore(MemoryStore(), [Rule(RaiseError(OSError(EIO, "x")), op="write", nth=3)])
    store = FaultyStore(LocalStore(path), [Rule(Kill(), nth=17)])     # die at the 17th call
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar, final

from ..base import Level, ObjectInfo, ReadRequest, Store, WriteStream, byte_view, check_range
from ..names import check_name, check_prefix, join
from .faults import Call, Fault, Op, Plan, Rule

_T = TypeVar("_T")
_NO_FAULT = Fault()


@final
class FaultyStore(Store):
    """``inner``, with faults as planned.

    ``plan`` is called with every ``Call`` and returns the fault to apply, if any; or it is a
    sequence of rules, of which the first that matches decides. ``delete`` counts as one call for
    each name, ``exists`` as a ``stat``, ``leftovers`` as a ``list``, ``replace`` as a ``publish``,
    ``remove`` as a ``delete``;
    closing the store does not count.
    """

    def __init__(self, inner: Store, plan: Plan | Sequence[Rule] = ()) -> None:
        self.url = inner.url
        self.request_bytes = inner.request_bytes
        self._inner = inner
        self._script = _Script(plan if callable(plan) else _ByRules(plan))
        self._prefix = ""

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call so far, in order, substores and streams included."""
        return self._script.calls

    def stat(self, name: str) -> ObjectInfo:
        return self._run("stat", name, 0, lambda: self._inner.stat(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        fault = self._next("read", name, 0 if stop is None else stop - start)
        fault.before()
        data = self._inner.read(name, start, stop)
        data = bytes(fault.received(memoryview(bytearray(data))))
        fault.after()
        return data

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        num_bytes = sum(request.view.nbytes for request in requests)
        fault = self._next("read_into", name, num_bytes)
        fault.before()
        if fault is _NO_FAULT:
            self._inner.read_into(name, requests)
            return
        scratch = memoryview(bytearray(num_bytes))
        parts: list[ReadRequest] = []
        start = 0
        for request in requests:
            stop = start + request.view.nbytes
            parts.append(ReadRequest(request.offset, scratch[start:stop]))
            start = stop
        self._inner.read_into(name, parts)
        _scatter(fault.received(scratch), requests)
        fault.after()

    def create(self, name: str, size: int) -> WriteStream:
        return self._create(name, size, self._inner.create)

    def create_anew(self, name: str, size: int) -> WriteStream:
        return self._create(name, size, self._inner.create_anew)

    def _create(
        self, name: str, size: int, create: Callable[[str, int], WriteStream]
    ) -> WriteStream:
        stream = self._run("create", name, size, lambda: create(name, size))
        where = join(self.url, name)
        return _FaultyStream(where, size, stream, lambda op, n: self._next(op, name, n))

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        self._publish(name, data, lambda sent: self._inner.publish(name, sent, overwrite=overwrite))

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        self._publish(name, data, lambda sent: self._inner.replace(name, sent, expected=expected))

    def _publish(self, name: str, data: bytes, effect: Callable[[bytes], None]) -> None:
        fault = self._next("publish", name, len(data))
        fault.before()
        effect(bytes(fault.sent(memoryview(data))))
        fault.after()

    def remove(self, name: str, *, expected: bytes) -> None:
        self._run("delete", name, 0, lambda: self._inner.remove(name, expected=expected))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._run("list", prefix, 0, lambda: self._inner.list(prefix))

    def level(self, prefix: str = "") -> Level:
        return self._run("list", prefix, 0, lambda: self._inner.level(prefix))

    def leftovers(self, prefix: str = "", *, before: float | None = None) -> Iterator[str]:
        return self._run("list", prefix, 0, lambda: self._inner.leftovers(prefix, before=before))

    def underway(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._run("list", prefix, 0, lambda: self._inner.underway(prefix))

    def delete(self, names: Iterable[str]) -> None:
        for name in [check_name(name, reserved=True) for name in names]:
            self._run("delete", name, 0, partial(self._inner.delete, [name]))

    def substore(self, prefix: str) -> Store:
        child = FaultyStore(self._inner.substore(prefix))
        child._script = self._script
        child._prefix = join(self._prefix, prefix)
        return child

    def sibling(self, name: str) -> Store:
        child = FaultyStore(self._inner.sibling(name))
        child._script = self._script
        child._prefix = join(self._prefix.rpartition("/")[0], name)
        return child

    def close(self) -> None:
        self._inner.close()

    def _next(self, op: Op, name: str, size: int) -> Fault:
        checked = check_prefix(name) if op == "list" else check_name(name, reserved=op == "delete")
        return self._script.next(op, join(self._prefix, checked), size) or _NO_FAULT

    def _run(self, op: Op, name: str, size: int, effect: Callable[[], _T]) -> _T:
        fault = self._next(op, name, size)
        fault.before()
        result = effect()
        fault.after()
        return result


class _FaultyStream(WriteStream):
    def __init__(
        self, where: str, size: int, inner: WriteStream, hook: Callable[[Op, int], Fault]
    ) -> None:
        """``hook(op, num_bytes)`` counts a call and gives its fault."""
        super().__init__(where, size)
        self._inner = inner
        self._hook = hook

    @property
    def alignment(self) -> int:
        return self._inner.alignment

    def shorten(self) -> None:
        super().shorten()
        self._inner.shorten()

    def _append(self, view: memoryview) -> None:
        fault = self._hook("write", view.nbytes)
        fault.before()
        self._inner.write(fault.sent(view))
        fault.after()

    def _finish(self) -> None:
        fault = self._hook("close", 0)
        fault.before()
        self._inner.close()
        fault.after()

    def _discard(self) -> None:
        fault = self._hook("abort", 0)
        fault.before()
        self._inner.abort()
        fault.after()


class _Script:
    """The numbering, the log and the plan that a store shares with its substores."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    @property
    def calls(self) -> tuple[Call, ...]:
        with self._lock:
            return tuple(self._calls)

    def next(self, op: Op, name: str, size: int) -> Fault | None:
        with self._lock:
            call = Call(number=len(self._calls) + 1, op=op, name=name, size=size)
            self._calls.append(call)
            return self._plan(call)


class _ByRules:
    """The plan that a sequence of rules stands for; it counts the matches of each."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._matches = [0] * len(self._rules)

    def __call__(self, call: Call) -> Fault | None:
        chosen: Fault | None = None
        for index, rule in enumerate(self._rules):
            if not rule.matches(call):
                continue
            self._matches[index] += 1
            if chosen is None and rule.nth in (None, self._matches[index]):
                chosen = rule.fault
        return chosen


def _scatter(data: memoryview, requests: Sequence[ReadRequest]) -> None:
    """Deal ``data`` out to the buffers in order, for as long as it lasts."""
    for request in requests:
        part = byte_view(data[: request.view.nbytes])
        request.view[: part.nbytes] = part
        data = data[part.nbytes :]
