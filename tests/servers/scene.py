"""A server of its own with a run on it, and ranks that save to it and load from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import CheckpointError
from dtckpt.storage import MemoryStore, Store

from ..ranks import RanksFailed, run_ranks
from .every import known
from .fake_s3 import BUCKET, FakeS3

WORLD = 2
ROWS = 4
SMALL, LARGE = 64, 5 << 19
"""Columns: what a rank holds is one object of one request, or is sent in parts."""
PATIENT = 120.0
"""A deadline that nothing comes to here."""


@dataclass(slots=True)
class Scene:
    """A server with a run that holds ``step-1``, and what ranks have loaded of it."""

    server: FakeS3
    options: dict[str, Any]
    url: str
    columns: int = SMALL
    world: int = WORLD
    loaded: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def save(self, step: int, group: Any) -> None:
        """Save a step, whose number is its value."""
        ckpt.save(
            _state(float(step), self.columns, self.world, group),
            f"{self.url}/step-{step}",
            process_group=group,
            storage_options=self.options,
        )

    def load(self, step: int, group: Any) -> None:
        """Load a step."""
        state = _state(-1.0, self.columns, self.world, group)
        ckpt.load(
            state, f"{self.url}/step-{step}", process_group=group, storage_options=self.options
        )
        self.loaded.append(state)

    def latest(self) -> int:
        """Return the number of the newest checkpoint that the server holds, which is whole.

        No request is made for it.
        """
        run = self.held()
        found = ckpt.latest(run, no_dist=True)
        assert found is not None
        step = run.substore(found.name)
        assert ckpt.verify(step).problems == ()
        with ckpt.open(step) as checkpoint:
            assert (checkpoint["w"][:] == found.number).all()
        return found.number

    def held(self) -> Store:
        """Return what the server holds of the run now."""
        start = self.url.partition(f"{BUCKET}/")[2] + "/"
        found = {name: one.data for name, one in self.server.keys.copy().items()}
        return MemoryStore(
            {name[len(start) :]: data for name, data in found.items() if name.startswith(start)}
        )

    def ranks(self, call: Callable[[int, Any], object]) -> list[CheckpointError | None]:
        """Let all ranks call; return what each was told, None if nothing."""
        try:
            run_ranks(self.world, call, seconds=180)
        except RanksFailed as failed:
            told = [failed.errors.get(rank) for rank in range(self.world)]
            errors = [
                error for error in told if error is None or isinstance(error, CheckpointError)
            ]
            if len(errors) < self.world:
                raise
            return errors
        return [None] * self.world

    def all_do(self, call: Callable[[int, Any], object]) -> None:
        """Let all ranks call, without an error."""
        told = self.ranks(call)
        assert not any(told), told


def begun(
    server: FakeS3,
    engine: str,
    columns: int = SMALL,
    *,
    world: int = WORLD,
    deadline: float = PATIENT,
) -> Scene:
    """Return a run on a server that holds the first step, to be gone on with under a deadline."""
    scheme = "gs" if "gcs" in type(server).__name__.lower() else "s3"
    found = known("own", f"{scheme}://{BUCKET}", server).by(engine)
    for name, data in _first_step(columns, world).items():
        server.objects.put(BUCKET, f"run/{name}", data)
    options = found.storage_options | {"deadline": deadline}
    return Scene(server, options, f"{found.url}/run", columns, world)


@lru_cache(1)
def _first_step(columns: int, world: int) -> dict[str, bytes]:
    """Return the objects of it."""
    objects: dict[str, bytes] = {}
    store = MemoryStore(objects).substore("step-1")

    def save(_: int, group: Any) -> None:
        ckpt.save(_state(1.0, columns, world, group), store, process_group=group)

    run_ranks(world, save)
    return objects


def _state(value: float, columns: int, world: int, group: Any) -> dict[str, Any]:
    """Return what a rank holds: its rows of a tensor, and a value."""
    mesh = DeviceMesh("cpu", Mesh((world,)), groups=[group])
    local = torch.full((ROWS // world, columns), value)
    return {
        "w": DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS, columns)),
        "n": value,
    }
