"""A server that goes silent, credentials that end, a missing bucket: in mid-save and in mid-load.

One error is told to all ranks, nothing is half committed, and the next save works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dtckpt.checkpoint as ckpt
from dtckpt.errors import AccessDenied, NotCommitted, StorageError, StorageTimeout

from ..ranks import RanksFailed, run_ranks
from ..waiting import beside_each_other
from .every import CHOSEN, IS_WHOLE
from .faults import Fault
from .scene import PATIENT, Scene, begun
from .test_faults import OWN, maker

# Drivers warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEADLINE = 1.0
AT_ONCE = 8
"""Most of the time goes by while nothing answers."""
SERVERS = pytest.mark.parametrize("name", [name for name in CHOSEN if name in OWN])
ENGINES = pytest.mark.parametrize("engine", ["fsspec", "obstore"])


def failures(scene: Scene, call: Callable[[int, Any], object]) -> dict[int, BaseException]:
    """Return what each rank was told; nothing hangs."""
    try:
        run_ranks(scene.world, call, seconds=60)
    except RanksFailed as failed:
        return failed.errors
    return {}


def num_requests(scene: Scene, call: Callable[[int, Any], object]) -> int:
    scene.server.forget()
    assert failures(scene, call) == {}
    return scene.server.counts.total()


def check_told(told: dict[int, BaseException], scene: Scene, kind: type[Exception]) -> None:
    assert {type(error) for error in told.values()} == {kind}, told
    assert set(told) == set(range(scene.world))
    assert len({str(error) for error in told.values()}) == 1


@SERVERS
@ENGINES
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(does="hang"), StorageTimeout),
        (Fault(status=403, code="ExpiredToken"), AccessDenied),
    ],
    ids=["hang", "expired"],
)
def test_from_some_request_on(name: str, engine: str, fault: Fault, kind: type[Exception]) -> None:
    make = maker(name, engine)
    with make() as server:
        scene = begun(server, engine)
        of_save = num_requests(scene, lambda _, group: scene.save(2, group))
        of_load = num_requests(scene, lambda _, group: scene.load(2, group))

    def check_save(skip: int) -> None:
        with make() as server:
            scene = begun(server, engine, deadline=DEADLINE)
            server.faults = [Fault(skip=skip, does=fault.does, status=403, code=fault.code)]
            told = failures(scene, lambda _, group: scene.save(2, group))
            server.faults = []
            scene.options["deadline"] = PATIENT
            if told:
                check_told(told, scene, kind)
                assert scene.latest() == 1
                scene.all_do(lambda _, group: scene.save(2, group))
            assert scene.latest() == 2

    def check_load(skip: int) -> None:
        with make() as server:
            scene = begun(server, engine, deadline=DEADLINE)
            server.faults = [Fault(skip=skip, does=fault.does, status=403, code=fault.code)]
            check_told(failures(scene, lambda _, group: scene.load(1, group)), scene, kind)

    # After the last but one the manifest is there: it may only not be read back.
    saves = range(of_save - 1) if IS_WHOLE else (of_save // 3, of_save - 2)
    for check, skips in ((check_save, saves), (check_load, range(of_load))):
        for begin in range(0, len(skips), AT_ONCE):
            beside_each_other(check, [(skip,) for skip in skips[begin : begin + AT_ONCE]])


@SERVERS
@ENGINES
def test_a_missing_bucket_is_told_as_that(name: str, engine: str) -> None:
    with maker(name, engine)() as server:
        scene = begun(server, engine)
        scheme = scene.url.partition("://")[0]
        scene.url = f"{scheme}://no-such-bucket/run"

        def latest(_: int, group: Any) -> None:
            ckpt.latest(scene.url, storage_options=scene.options, process_group=group)

        def save(_: int, group: Any) -> None:
            scene.save(1, group)

        def load(_: int, group: Any) -> None:
            scene.load(1, group)

        for call in (save, load, latest):
            told = failures(scene, call)
            check_told(told, scene, StorageError)
            assert not isinstance(told[0], NotCommitted)
            assert "bucket does not exist" in str(told[0])
