"""Ranks in threads of which one runs at a time, with process groups that are memory.

A rank runs until it waits for others; then the next one that can go on does. So a program runs
alike each time, a collective costs microseconds, and a deadlock is seen at once: no rank can go on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Mesh

_c10d: Any = dist  # torch's stubs leave out the reductions


class RanksDiverged(Exception):
    """A rank waits for others that will not come, or that issue another collective."""


@dataclass
class Outcome:
    """What one rank came to."""

    result: Any = None
    error: Exception | None = None


class Team:
    """Threads of the ranks of one job, which run bodies in turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._all_done = threading.Semaphore(0)
        self._body: Callable[[int], Any] = lambda rank: None
        self._outcomes: list[Outcome] = []
        self._conditions: list[Callable[[], bool] | None] = []
        self._done: list[bool] = []
        self._is_stuck = False
        self._groups: dict[object, _GroupState] = {}
        for rank in range(size):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def run(self, body: Callable[[int], Any]) -> list[Outcome]:
        """Run ``body(rank)`` on each rank; what they came to.

        Ranks that wait for what never comes raise RanksDiverged; where a collective that some
        ranks have started lacks others at the end, so does the outcome of those.
        """
        self._body = body
        self._outcomes = [Outcome() for _ in range(self.size)]
        self._conditions = [None] * self.size
        self._done = [False] * self.size
        self._is_stuck = False
        for state in self._groups.values():
            state.reset()
        self._turns[0].release()
        self._all_done.acquire()
        self._body = lambda rank: None  # keeps nothing alive
        outcomes, self._outcomes = self._outcomes, []
        for state in self._groups.values():
            state.report_unmatched(outcomes)
        return outcomes

    def mesh(self, rank: int, shape: tuple[int, ...]) -> DeviceMesh:
        """Return one rank's mesh of all ranks."""
        mesh = Mesh(shape)
        here = mesh.coordinate(rank) or ()
        groups: list[Any] = []
        for axis, size in enumerate(shape):
            others = tuple(i for a, i in enumerate(here) if a != axis)
            ranks = mesh.submesh((axis,), here).all_ranks()
            groups.append(self._group((shape, axis, others), here[axis], size, ranks))
        world = self._group(shape, rank, self.size, tuple(range(self.size)))
        return DeviceMesh("cpu", mesh, groups=groups, world_group=world)

    def wait_until(self, rank: int, condition: Callable[[], bool], what: str) -> None:
        """Let other ranks run until a condition holds; RanksDiverged where it never will."""
        while not condition():
            if self._is_stuck:
                raise RanksDiverged(f"rank {rank} waits for {what}")
            self._conditions[rank] = condition
            self._pass_turn(rank)
            self._turns[rank].acquire()
            self._conditions[rank] = None

    def _group(self, key: object, rank: int, size: int, ranks: Sequence[int]) -> Group:
        state = self._groups.setdefault(key, _GroupState(size, tuple(ranks)))
        return Group(self, state, rank)

    def _serve(self, rank: int) -> None:
        while True:
            self._turns[rank].acquire()
            outcome = self._outcomes[rank]
            try:
                outcome.result = self._body(rank)
            except Exception as error:
                outcome.error = error
            del outcome
            self._done[rank] = True
            self._pass_turn(rank)

    def _pass_turn(self, rank: int) -> None:
        """Let the next rank run that can."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        for other in order:
            if not self._done[other]:
                condition = self._conditions[other]
                if condition is None or condition():
                    self._turns[other].release()
                    return
        waiting = [other for other in order if not self._done[other]]
        if not waiting:
            self._all_done.release()
            return
        self._is_stuck = True
        self._turns[waiting[0]].release()


@dataclass
class _Meeting:
    """One collective: what the ranks that have come there gave."""

    kinds: dict[int, str] = field(default_factory=dict[int, str])
    given: dict[int, Any] = field(default_factory=dict[int, Any])
    is_complete: bool = False
    fault: str = ""


class _GroupState:
    """What the ends of one process group share."""

    def __init__(self, size: int, ranks: tuple[int, ...]) -> None:
        self.size, self.ranks = size, ranks
        self.reset()

    def reset(self) -> None:
        self.numbers = [0] * self.size
        self.meetings: dict[int, _Meeting] = {}
        self.mail: dict[tuple[int, int], deque[Tensor]] = {}

    def report_unmatched(self, outcomes: list[Outcome]) -> None:
        for meeting in self.meetings.values():
            if meeting.is_complete:
                continue
            for rank, kind in meeting.kinds.items():
                outcome = outcomes[self.ranks[rank]]
                if outcome.error is None:
                    outcome.error = RanksDiverged(f"rank {rank} started {kind}; others never did")


class _Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, *_: object) -> bool:
        self._wait()
        return True


class Group:
    """One rank's end of a process group, as far as the library calls it."""

    def __init__(self, team: Team, state: _GroupState, rank: int) -> None:
        self._team, self._state, self._rank = team, state, rank

    def name(self) -> str:
        """Return the backend that it stands for."""
        return "gloo"

    def rank(self) -> int:
        """Return the rank within the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._state.size

    def _allgather_base(self, received: Tensor, sent: Tensor) -> _Work:
        def move(given: list[Any]) -> None:
            for into, _ in given:
                torch.cat([part.view(-1) for _, part in given], out=into.view(-1))

        return self._meet(f"all_gather of {sent.nbytes} bytes", (received, sent), move)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]
    ) -> _Work:
        def move(given: list[Any]) -> None:
            rows = [list(part.split(sizes)) for _, part, _, sizes in given]
            for rank, (into, _, sizes, _) in enumerate(given):
                parts = [row[rank] for row in rows]
                if [part.numel() for part in parts] != sizes:
                    raise RanksDiverged(
                        f"all_to_all: rank {rank} expects {sizes} bytes, "
                        f"others send {[part.numel() for part in parts]}"
                    )
                if parts:
                    torch.cat(parts, out=into)

        return self._meet("all_to_all", (received, sent, incoming, outgoing), move)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        (tensor,) = tensors
        op = options.reduceOp

        def move(given: list[Any]) -> None:
            total = given[0].clone()
            for term in given[1:]:
                total = _REDUCTIONS[str(op).rpartition(".")[2]](total, term)
            for term in given:
                term.copy_(total)

        return self._meet(f"all_reduce {op} of {tensor.numel()} {tensor.dtype}", tensor, move)

    def broadcast(self, tensor: Tensor, root: int) -> _Work:
        def move(given: list[Any]) -> None:
            for other in given:
                if other is not given[root]:
                    other.copy_(given[root])

        return self._meet(f"broadcast of {tensor.nbytes} bytes from {root}", tensor, move)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        del tag
        self._state.mail.setdefault((self._rank, to), deque()).append(tensors[0].clone())
        return _Work(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        del tag
        box = self._state.mail.setdefault((source, self._rank), deque())

        def wait() -> None:
            what = f"a message of {tensors[0].nbytes} bytes from rank {source}"
            self._team.wait_until(self._state.ranks[self._rank], lambda: bool(box), what)
            message = box.popleft()
            if message.nbytes != tensors[0].nbytes:
                raise RanksDiverged(f"{what}, got {message.nbytes} bytes")
            tensors[0].copy_(message)

        return _Work(wait)

    def _meet(self, kind: str, given: Any, move: Callable[[list[Any]], None]) -> _Work:
        state, rank = self._state, self._rank
        number = state.numbers[rank]
        state.numbers[rank] += 1
        meeting = state.meetings.setdefault(number, _Meeting())
        meeting.kinds[rank], meeting.given[rank] = kind, given
        if len(meeting.kinds) == state.size:
            if len(set(meeting.kinds.values())) > 1:
                told = "; ".join(f"rank {r}: {k}" for r, k in sorted(meeting.kinds.items()))
                meeting.fault = f"ranks issue different collectives: {told}"
            else:
                try:
                    move([meeting.given[r] for r in range(state.size)])
                except RanksDiverged as error:
                    meeting.fault = str(error)
            meeting.is_complete = True
            meeting.given.clear()
            del state.meetings[number]

        def wait() -> None:
            self._team.wait_until(state.ranks[rank], lambda: meeting.is_complete, kind)
            if meeting.fault:
                raise RanksDiverged(meeting.fault)

        return _Work(wait)


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}
