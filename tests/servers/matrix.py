"""Every fault at every kind of request of every operation, and what shall come of it: as data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import CheckpointError

from ..ranks import RanksFailed, run_ranks
from .every import known
from .fake_s3 import BUCKET, FakeS3
from .faults import Deed, Fault, Kind

WORLD = 2
ROWS = 4
SMALL, LARGE = 64, 9 << 19
"""Columns: what a rank holds is one object of one request, or is sent in parts."""
DEADLINE, LONG_DEADLINE = 3.0, 8.0
"""Seconds that every operation of a store is given; the long one is for what is large."""

PATIENCE = 120.0
"""Seconds for looking what came of it; what is looked at is not how fast that is."""

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

    def fault(self, kind: Kind, limit: int | None) -> Fault:
        """Return the fault of requests of a kind, so many times."""
        return Fault(
            does=self.does,
            status=self.status,
            code=self.code,
            carry_out=self.carry_out,
            kinds={kind},
            limit=limit,
        )


_READING: frozenset[Kind] = frozenset({"get", "list"})

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


@dataclass(slots=True)
class Scene:
    """A server of its own with a run, and what its ranks have loaded."""

    server: FakeS3
    options: dict[str, Any]
    url: str
    columns: int = SMALL
    world: int = WORLD
    loaded: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def state(self, value: float, group: Any) -> dict[str, Any]:
        """Return what a rank holds: its rows of a tensor, and a value."""
        mesh = DeviceMesh("cpu", Mesh((self.world,)), groups=[group])
        local = torch.full((ROWS // self.world, self.columns), value)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS, self.columns))
        return {"w": tensor, "n": value}

    def save(self, step: int, group: Any) -> None:
        """Save a step, whose number is its value."""
        ckpt.save(
            self.state(float(step), group),
            f"{self.url}/step-{step}",
            process_group=group,
            storage_options=self.options,
        )

    def load(self, step: int, group: Any) -> None:
        """Load a step."""
        state = self.state(-1.0, group)
        ckpt.load(
            state, f"{self.url}/step-{step}", process_group=group, storage_options=self.options
        )
        self.loaded.append(state)

    def latest(self) -> int:
        """Return the number of the newest checkpoint, which is whole."""
        found = ckpt.latest(self.url, storage_options=self.options, no_dist=True)
        assert found is not None
        assert ckpt.verify(found.url, storage_options=self.options).problems == ()
        with ckpt.open(found.url, storage_options=self.options) as checkpoint:
            assert (checkpoint["w"][:] == found.number).all()
        return found.number

    def ranks(self, call: Callable[[int, Any], object]) -> list[str]:
        """Let all ranks call; return what each was told, '' if nothing."""
        try:
            run_ranks(self.world, call, seconds=120)
        except RanksFailed as failed:
            if not all(isinstance(e, CheckpointError) for e in failed.errors.values()):
                raise
            return [str(failed.errors.get(rank, "")) for rank in range(self.world)]
        return [""] * self.world


def _saved(scene: Scene) -> None:
    assert scene.latest() == 2


def _loaded(scene: Scene) -> None:
    assert len(scene.loaded) == WORLD
    for state in scene.loaded:
        assert (state["w"].to_local() == 1).all()
        assert state["n"] == 1


def _kept(scene: Scene) -> None:
    assert scene.latest() == 1


def _deleted(scene: Scene) -> None:
    assert ckpt.latest(scene.url, storage_options=scene.options, no_dist=True) is None


def _find(scene: Scene, rank: int, group: Any) -> None:
    found = ckpt.latest(scene.url, storage_options=scene.options, process_group=group)
    assert found is not None, "a listing that failed is not an empty one"
    assert found.number == 1


def _delete(scene: Scene, rank: int, group: Any) -> None:
    if rank == 0:
        ckpt.delete(f"{scene.url}/step-1", storage_options=scene.options)


_HEAVY = frozenset({"slow down", "reset", "reply lost", "hang", "denied"})
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
    Operation("latest", _find, _kept),
    Operation("delete", _delete, _deleted),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the matrix."""

    operation: Operation
    kind: Kind
    trouble: Trouble
    limit: int | None

    def __str__(self) -> str:
        often = "always" if self.limit is None else f"{self.limit} x"
        return f"{self.operation.name}: {self.trouble.name} at {self.kind}, {often}"

    @property
    def expected(self) -> Outcome:
        """Say what shall come of it; an answer that is lost may not have been needed."""
        if self.trouble.passes and self.limit is not None:
            return "done"
        may_do_without = self.trouble.carry_out or self.kind in self.operation.dispensable
        return "either" if may_do_without else "error"


def rows_of(operation: Operation, kinds: list[Kind]) -> Iterator[Row]:
    """Give the lines of an operation that makes requests of these kinds."""
    for kind, trouble in itertools.product(kinds, TROUBLES):
        is_named = operation.troubles is None or trouble.name in operation.troubles
        if is_named and (trouble.only is None or kind in trouble.only):
            for limit in (trouble.times, None):
                yield Row(operation=operation, kind=kind, trouble=trouble, limit=limit)


def kinds_of(operation: Operation, make: Callable[[], FakeS3], engine: str) -> list[Kind]:
    """Return the kinds of requests that an operation makes."""
    with make() as server:
        scene = begun(server, engine, operation.columns)
        server.forget()
        assert scene.ranks(lambda rank, group: operation.do(scene, rank, group)) == [""] * WORLD
        found = sorted(server.counts)
        operation.check(scene)
        return [kind for kind in found if operation.columns == SMALL or "upload" in kind]


def begun(
    server: FakeS3,
    engine: str,
    columns: int = SMALL,
    *,
    world: int = WORLD,
    deadline: float | None = None,
) -> Scene:
    """Return a run that holds the first step, to be gone on with under a deadline."""
    scheme = "gs" if "gcs" in type(server).__name__.lower() else "s3"
    found = known("own", f"{scheme}://{BUCKET}", server).by(engine)
    scene = Scene(server, found.storage_options, f"{found.url}/run", world=world)
    assert scene.ranks(lambda _, group: scene.save(1, group)) == [""] * world
    if deadline is None:
        deadline = DEADLINE if columns == SMALL else LONG_DEADLINE
    options = found.storage_options | {"deadline": deadline}
    return replace(scene, options=options, columns=columns)


def run_row(row: Row, make: Callable[[], FakeS3], engine: str) -> str | None:
    """Return what is wrong about what came of a line, if anything is."""
    with make() as server:
        scene = begun(server, engine, row.operation.columns)
        fault = row.trouble.fault(row.kind, row.limit)
        server.faults = [fault]
        began = time.monotonic()
        try:
            told = scene.ranks(lambda rank, group: row.operation.do(scene, rank, group))
            seconds = time.monotonic() - began
            server.faults = []
            scene.options["deadline"] = PATIENCE
            return _judged(row, scene, told, fault.hits, seconds)
        except (AssertionError, TimeoutError, CheckpointError, RanksFailed) as error:
            return f"{row}: {type(error).__name__}: {error}"


def _judged(row: Row, scene: Scene, told: list[str], hits: int, seconds: float) -> str | None:
    is_done = not any(told)
    operation = row.operation
    if row.expected == ("error" if is_done else "done"):
        return f"{row}: {told[0] or 'done'} ({hits} hits, {seconds:.1f} s)"
    if operation.name != "delete" and len({bool(one) for one in told}) != 1:
        return f"{row}: ranks were told different things: {told}"
    if is_done:
        operation.check(scene)
        return None
    if operation.name.startswith("save"):
        assert scene.latest() in (1, 2)
        if scene.latest() == 1:
            assert scene.ranks(lambda _, group: scene.save(2, group)) == [""] * WORLD
    else:
        scene.loaded.clear()
        again = scene.ranks(lambda rank, group: operation.do(scene, rank, group))
        if operation.name != "delete":
            assert again == [""] * WORLD, again
    operation.check(scene)
    return None
