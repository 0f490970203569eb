"""A server whose clock is hours off: it refuses, which is told as that, or ages are right."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import AccessDenied

from .every import CHOSEN
from .fake_s3 import BUCKET
from .matrix import OPERATIONS, Operation
from .scene import SMALL, Scene, begun
from .test_faults import OWN, maker

# Drivers warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HOUR = 3600.0
ENGINES = pytest.mark.parametrize("engine", ["fsspec", "obstore"])
SERVERS = pytest.mark.parametrize("name", [name for name in CHOSEN if name in OWN])
SKEWS = pytest.mark.parametrize("hours", [-6, 6])
SMALL_OPERATIONS = pytest.mark.parametrize(
    "operation", [one for one in OPERATIONS if one.columns == SMALL], ids=lambda one: one.name
)


def keys(scene: Scene) -> set[str]:
    return {info.name for info in scene.held().list()}


@pytest.mark.skipif("fake-s3" not in CHOSEN, reason="others do not look at the time of a request")
@ENGINES
@SKEWS
@SMALL_OPERATIONS
def test_a_server_that_refuses_is_told_of(engine: str, hours: int, operation: Operation) -> None:
    with maker("fake-s3", engine)() as server:
        scene = begun(server, engine)
        before = keys(scene)
        server.clock_skew = hours * HOUR
        told = scene.ranks(lambda rank, group: operation.do(scene, rank, group))
        errors = [error for error in told if error is not None]
        assert {type(error) for error in errors} == {AccessDenied}, told
        assert all("clock" in str(error) for error in errors), told
        assert len(errors) == (1 if operation.name == "delete" else scene.world)
        assert keys(scene) == before
        server.clock_skew = 0.0
        scene.all_do(lambda rank, group: operation.do(scene, rank, group))
        operation.check(scene)


@SERVERS
@ENGINES
@SKEWS
@SMALL_OPERATIONS
def test_one_that_does_not_care_works(
    name: str, engine: str, hours: int, operation: Operation
) -> None:
    with maker(name, engine)() as server:
        server.is_lenient = True
        server.clock_skew = hours * HOUR
        scene = begun(server, engine)
        scene.all_do(lambda rank, group: operation.do(scene, rank, group))
        operation.check(scene)


@SERVERS
@ENGINES
@SKEWS
def test_checkpoints_go_by_their_age(name: str, engine: str, hours: int) -> None:
    """Also those whose saves have died before they wrote down when they were made."""
    with maker(name, engine)() as server:
        server.is_lenient = True
        scene = begun(server, engine, world=1)
        for step, age in ((2, 2 * HOUR), (3, 0.0), (4, 0.0)):
            server.clock_skew = hours * HOUR - age
            scene.all_do(lambda _, group, step=step: scene.save(step, group))
        server.objects.buckets[BUCKET] = {
            key: found for key, found in server.keys.items() if "/step-1/" not in key
        }
        state = {"w": torch.zeros(4, SMALL), "n": 0.0}
        with ckpt.CheckpointManager(
            scene.url,
            storage_options=scene.options,
            no_dist=True,
            keep=ckpt.Keep(younger_than=timedelta(hours=1)),
        ) as manager:
            manager.restore(state)
            assert state["n"] == 4
            assert manager.save(5, state)
            manager.wait()
            assert manager.all_steps() == (3, 4, 5)


@SERVERS
@ENGINES
@SKEWS
def test_what_dead_saves_left_goes_by_its_age(name: str, engine: str, hours: int) -> None:
    with maker(name, engine)() as server:
        server.is_lenient = True
        scene = begun(server, engine)
        name = next(name for name in sorted(keys(scene)) if "/data/" in name)
        data = server.keys[f"run/{name}"].data
        # By the clock of this machine, too, which is behind that of some.
        ages = {2: 0.0, 3: 0.5, 4: 2.0 + max(hours, 0)}
        left = {step: name.replace("step-1/", f"step-{step}/") for step in ages}
        for step, age in ages.items():
            server.clock_skew = (hours - age) * HOUR
            server.objects.put(BUCKET, f"run/{left[step]}", data)
        server.clock_skew = hours * HOUR
        before = keys(scene)
        hour = timedelta(hours=1)
        gone = ckpt.clean(scene.url, storage_options=scene.options, older_than=hour)
        assert gone == [left[4]]
        assert keys(scene) == before - {left[4]}
        assert scene.latest() == 1
