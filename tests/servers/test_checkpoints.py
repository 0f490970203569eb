"""The life of a run on the servers that were chosen, by 4 ranks; every bit is compared."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh
from dtckpt.storage import open_store

from ..python import run_python
from ..ranks import run_ranks
from .every import IS_WHOLE
from .server import Server
from .training import LARGE, SMALL, WORLD, is_step, save_all, state_of, whole

# Drivers and servers warn of their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
SHAPE = LARGE if IS_WHOLE else SMALL


@pytest.fixture
def url(server: Server) -> str:
    return f"{server.url}/{uuid.uuid4().hex}"


def check_load(
    url: str,
    options: dict[str, Any],
    step: int,
    size: int,
    dim: int,
    shape: tuple[int, int] = SMALL,
) -> None:
    """Load a step by so many ranks, each of which finds its part."""

    def load(rank: int, group: Any) -> bool:
        state = state_of(rank, size, group, -1, shape=shape, dim=dim)
        state["frozen"].to_local().fill_(-1)
        ckpt.load(state, f"{url}/step-{step}", process_group=group, storage_options=options)
        return is_step(state, rank, size, step, shape, dim)

    assert run_ranks(size, load) == [True] * size


def newest(url: str, options: dict[str, Any]) -> int:
    found = ckpt.latest(url, storage_options=options, no_dist=True)
    assert found is not None
    assert found.number is not None
    return found.number


def test_the_life_of_a_run(server: Server, url: str) -> None:
    options = server.storage_options
    save_all(url, options, 1, shape=SHAPE)
    check_load(url, options, 1, WORLD, 0, SHAPE)
    reports = save_all(url, options, 2, shape=SHAPE, base=f"{url}/step-1")
    assert sum(report.borrowed_bytes for report in reports) == whole(SHAPE, 0).nbytes
    check_load(url, options, 2, 2, 1, SHAPE)

    def save_in_background(rank: int, group: Any) -> None:
        state = state_of(rank, WORLD, group, 3, shape=SHAPE)
        handle = ckpt.async_save(
            state, f"{url}/step-3", process_group=group, storage_options=options
        )
        state["trained"].to_local().fill_(0)
        handle.result()

    run_ranks(WORLD, save_in_background)
    check_load(url, options, 3, 2, 0, SHAPE)
    ckpt.reshard(
        f"{url}/step-3",
        f"{url}/other",
        Mesh.parse("dp=2"),
        ckpt.parse_rules("frozen=S(1);trained=S(1)"),
        source_options=options,
        target_options=options,
    )
    with ckpt.open(f"{url}/other", storage_options=options) as checkpoint:
        assert torch.equal(checkpoint["frozen"][:], whole(SHAPE, 0))
        assert torch.equal(checkpoint["trained"][3:5, 7], whole(SMALL, 3)[3:5, 7])
    for name in ("step-1", "step-2", "step-3", "other"):
        assert ckpt.verify(f"{url}/{name}", storage_options=options).problems == ()
    assert newest(url, options) == 3


def test_old_checkpoints_go(server: Server, url: str) -> None:
    options = server.storage_options

    def train(rank: int, group: Any) -> tuple[int, ...]:
        with ckpt.CheckpointManager(
            url, storage_options=options, process_group=group, keep=ckpt.Keep(last=2)
        ) as manager:
            for step in range(1, 5):
                state = {"w": torch.full((3,), step), "step": step}
                assert manager.save(step, state)
                manager.wait()
            return manager.all_steps()

    assert run_ranks(WORLD, train) == [(3, 4)] * WORLD
    assert newest(url, options) == 4
    left = {
        info.name.partition("/")[0].removesuffix(".json")
        for info in open_store(url, **options).list()
    }
    assert left == {"step-3", "step-4"}


@pytest.mark.parametrize("call", ["close", "publish"] if IS_WHOLE else ["publish"])
def test_a_run_goes_on_after_a_kill(server: Server, url: str, call: str) -> None:
    options = server.storage_options
    killed = run_python("-m", "tests.servers.training", url, json.dumps(options), call)
    assert killed.returncode == -9, killed.stderr[-2000:]
    assert newest(url, options) == 1
    check_load(url, options, 1, 2, 1)
    save_all(url, options, 2, overwrite=True)
    assert newest(url, options) == 2
    check_load(url, options, 2, WORLD, 0)
    assert ckpt.verify(f"{url}/step-2", storage_options=options).problems == ()
