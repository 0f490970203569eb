"""Every fault at every kind of request of every operation, and what shall come of it: as data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import dtckpt.checkpoint as ckpt
from dtckpt.errors import CheckpointError, Corrupt

from ..ranks import RanksFailed
from .fake_s3 import FakeS3
from .faults import Deed, Fault, Kind
from .scene import LARGE, PATIENT, SMALL, Scene, begun

Outcome = Literal["done", "error", "either"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A fault, and whether an operation gets past it."""

    name: str
    does: Deed = "refuse"
    status: int = 503
    code: str = ""
    carry_out: bool = False
    passes: bool = True
    """Whether asking again helps once it is over; else it is told at once."""
    times: int = 2
    """At so many the deadline still holds."""
    only: frozenset[Kind] | None = None
    """Makes sense for these kinds only."""

    def fault(self, kind: Kind, skip: int, limit: int | None) -> Fault:
        """Return the fault of requests of a kind, after some, so many times."""
        return Fault(
            does=self.does,
            status=self.status,
            code=self.code,
            carry_out=self.carry_out,
            kinds={kind},
            skip=skip,
            limit=limit,
        )

    @property
    def is_silent(self) -> bool:
        """Whether a request has to be waited for until its time is up."""
        return self.does in ("hang", "stall")


_READING: frozenset[Kind] = frozenset({"get", "list"})
# Lists have nothing that shows whether they are as they were sent.
_CHECKED: frozenset[Kind] = frozenset({"get", "put", "upload-part"})

TROUBLES = (
    Trouble(name="slow down", code="SlowDown"),
    Trouble(name="too many", status=429, code="TooManyRequests"),
    Trouble(name="internal", status=500, code="InternalError"),
    Trouble(name="reset", does="reset"),
    Trouble(name="reply lost", does="reset", carry_out=True),
    Trouble(name="reply refused", code="SlowDown", carry_out=True),
    Trouble(name="hang", does="hang", times=1),
    Trouble(name="truncated", does="truncate", only=_READING),
    Trouble(name="stall", does="stall", times=1, only=_READING),
    Trouble(name="denied", status=403, code="AccessDenied", passes=False),
    Trouble(name="expired", status=403, code="ExpiredToken", passes=False),
    Trouble(name="no bucket", status=404, code="NoSuchBucket", passes=False),
    Trouble(name="altered", does="alter", times=1, only=_CHECKED, passes=False),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that ranks do with a run that holds ``step-1``."""

    name: str
    do: Callable[[Scene, int, Any], object]
    """Called by every rank with its group."""
    check: Callable[[Scene], None]
    """Called once it has been done, without trouble."""
    dispensable: frozenset[Kind] = frozenset({"head", "abort-upload", "list-uploads"})
    """Kinds of requests that are made to be sure, or to clear up; it may do without."""
    columns: int = SMALL
    troubles: frozenset[str] | None = None
    """Of these names only."""

    @property
    def is_save(self) -> bool:
        """Whether it makes ``step-2``."""
        return self.name.startswith("save")


def _saved(scene: Scene) -> None:
    assert scene.latest() == 2


def _loaded(scene: Scene, step: int = 1) -> None:
    assert len(scene.loaded) == scene.world
    for state in scene.loaded:
        assert (state["w"].to_local() == step).all()
        assert state["n"] == step


def _kept(scene: Scene) -> None:
    assert scene.latest() == 1


def _deleted(scene: Scene) -> None:
    assert ckpt.latest(scene.held(), no_dist=True) is None


def _find(scene: Scene, rank: int, group: Any) -> None:
    found = ckpt.latest(scene.url, storage_options=scene.options, process_group=group)
    assert found is not None, "a listing that failed is not an empty one"
    assert found.number == 1


def _delete(scene: Scene, rank: int, group: Any) -> None:
    if rank == 0:
        ckpt.delete(f"{scene.url}/step-1", storage_options=scene.options)


_HEAVY = frozenset({"slow down", "reset", "reply lost", "hang", "denied", "altered"})
_SURE: frozenset[Kind] = frozenset({"head", "get", "abort-upload", "list-uploads"})

OPERATIONS = (
    Operation("save", lambda scene, rank, group: scene.save(2, group), _saved, _SURE),
    Operation(
        "save in parts",
        lambda scene, rank, group: scene.save(2, group),
        _saved,
        _SURE,
        columns=LARGE,
        troubles=_HEAVY,
    ),
    Operation("load", lambda scene, rank, group: scene.load(1, group), _loaded),
    Operation(
        "load of ranges",
        lambda scene, rank, group: scene.load(1, group),
        _loaded,
        columns=LARGE,
        troubles=_HEAVY | {"truncated", "stall"},
    ),
    Operation("latest", _find, _kept),
    Operation("delete", _delete, _deleted),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the matrix."""

    operation: Operation
    kind: Kind
    trouble: Trouble
    skip: int
    """So many of the kind go well first."""
    limit: int | None

    def __str__(self) -> str:
        often = "always" if self.limit is None else f"{self.limit} x"
        after = f" after {self.skip}" if self.skip else ""
        return f"{self.operation.name}: {self.trouble.name} at {self.kind}{after}, {often}"

    @property
    def expected(self) -> Outcome:
        """Say what shall come of it; an answer that is lost may not have been needed."""
        if self.trouble.passes and self.limit is not None:
            return "done"
        may_do_without = self.trouble.carry_out or self.kind in self.operation.dispensable
        return "either" if may_do_without or self.trouble.does == "alter" else "error"

    @property
    def deadline(self) -> float:
        """Seconds for each operation of a store: few only where all of them are waited for.

        The rest has to be done in time on a busy machine, too.
        """
        is_small = self.operation.columns == SMALL
        if self.trouble.passes and self.limit is None:
            return 1.0 if is_small else 3.0
        if self.trouble.is_silent:  # asked again after a share of it
            return 8.0 if is_small else 16.0
        return PATIENT


def rows_of(operation: Operation, counts: Mapping[Kind, int]) -> Iterator[Row]:
    """Give the lines of an operation that makes so many requests of these kinds.

    What is altered is another thing each time: each one of them is the first that is.
    """
    for kind, trouble in itertools.product(counts, TROUBLES):
        is_named = operation.troubles is None or trouble.name in operation.troubles
        if is_named and (trouble.only is None or kind in trouble.only):
            skips = range(counts[kind] if trouble.does == "alter" else 1)
            for skip, limit in itertools.product(skips, (trouble.times, None)):
                yield Row(operation=operation, kind=kind, trouble=trouble, skip=skip, limit=limit)


def counts_of(operation: Operation, make: Callable[[], FakeS3], engine: str) -> dict[Kind, int]:
    """Return how many requests of each kind an operation makes."""
    with make() as server:
        scene = begun(server, engine, operation.columns)
        scene.all_do(lambda rank, group: operation.do(scene, rank, group))
        counts = server.counts
        operation.check(scene)
    is_chosen = operation.columns == SMALL or not operation.is_save
    return {kind: counts[kind] for kind in sorted(counts) if is_chosen or "upload" in kind}


def run_row(row: Row, make: Callable[[], FakeS3], engine: str) -> str | None:
    """Return what is wrong about what came of a line, if anything is."""
    for seconds in (row.deadline, 4 * row.deadline, 16 * row.deadline):
        wrong, hits = _run_once(row, make, engine, seconds)
        if hits:
            return wrong
    # On a busy machine a short deadline may have passed before the request was made.
    return f"{row}: no such request was made: {wrong}"


def _run_once(
    row: Row, make: Callable[[], FakeS3], engine: str, deadline: float
) -> tuple[str | None, int]:
    """Return what is wrong, and how many requests were hit."""
    with make() as server:
        scene = begun(server, engine, row.operation.columns, deadline=deadline)
        fault = row.trouble.fault(row.kind, row.skip, row.limit)
        server.faults = [fault]
        began = time.monotonic()
        try:
            told = scene.ranks(lambda rank, group: row.operation.do(scene, rank, group))
            server.faults = []
            scene.options["deadline"] = PATIENT
            _judge(row, scene, told)
        except (AssertionError, TimeoutError, CheckpointError, RanksFailed) as error:
            took = f"{fault.hits} hits, {time.monotonic() - began:.1f} s"
            return f"{row}: {type(error).__name__}: {error} ({took})", fault.hits
        return None, fault.hits


def _judge(row: Row, scene: Scene, told: list[CheckpointError | None]) -> None:
    """Raise AssertionError unless it came of the line what had to."""
    is_done = not any(told)
    operation = row.operation
    if row.expected == ("error" if is_done else "done"):
        raise AssertionError(told[0] or "done")
    if operation.name != "delete":
        assert len({error is None for error in told}) == 1, f"ranks were told of {told}"
    if row.trouble.does == "alter":
        if operation.is_save:
            _judge_altered_save(scene, told)
            return
        assert all(isinstance(error, Corrupt) for error in told if error), told
    if is_done:
        operation.check(scene)
        return
    if operation.is_save:
        newest = scene.latest()
        assert newest in (1, 2)
        if newest == 1:
            scene.all_do(lambda _, group: scene.save(2, group))
    else:
        scene.loaded.clear()
        again = scene.ranks(lambda rank, group: operation.do(scene, rank, group))
        assert operation.name == "delete" or not any(again), again
    operation.check(scene)


def _judge_altered_save(scene: Scene, told: list[CheckpointError | None]) -> None:
    """Raise AssertionError unless what was saved is right or known to be damaged, and goes on."""
    assert all("altered on its way" in str(error) for error in told if error), told
    step = 1 if any(told) else 2
    loaded = scene.ranks(lambda _, group: scene.load(step, group))
    assert step == 2 or not any(loaded), loaded
    assert all(isinstance(error, Corrupt) for error in loaded if error), loaded
    if not any(loaded):
        _loaded(scene, step)
    scene.all_do(lambda _, group: scene.save(3, group))
    assert scene.latest() == 3
