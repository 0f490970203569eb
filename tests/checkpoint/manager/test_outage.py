"""A training whose S3 server refuses everything for a while goes on, and the next save is whole.

``python -m tests.checkpoint.manager.test_outage MINUTES`` is refused for as long as that.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import StorageError

from ...ranks import run_ranks
from ...servers.fake_s3 import BUCKET, FakeS3, fake_s3
from ...servers.faults import Fault

# botocore warns of its own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("short_pauses"),
]

WORLD = 2
ROWS = 4


def state_at(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    local = torch.full((ROWS // WORLD, 100), float(step))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=(ROWS, 100)), "step": step}


class Loop:
    """A training loop on some ranks; the first one cuts the server off, and gives it back."""

    def __init__(self, server: FakeS3, seconds: float) -> None:
        self.url = f"s3://{BUCKET}/run"
        self.server = server
        patience = {} if seconds else {"deadline": 2}
        self.options = server.storage_options | patience
        self.seconds = seconds
        """How long it is refused; at least for two saves."""

    def run(self, rank: int, group: dist.ProcessGroup) -> tuple[list[int], tuple[int, ...]]:
        """Return the steps whose saves failed, and those that the run holds at the end."""
        mesh = DeviceMesh("cpu", Mesh((WORLD,)), groups=[group])
        with ckpt.CheckpointManager(
            self.url,
            storage_options=self.options,
            process_group=group,
            on_failure="warn",
            timeout=timedelta(minutes=2),
        ) as manager:
            for step in (1, 2):
                assert manager.save(step, state_at(step, mesh))
            manager.wait()
            group.barrier().wait()
            began, over = time.monotonic(), torch.tensor([0])
            while not over.item():
                if rank == 0:  # in the middle of a save, and then from its beginning
                    self.server.faults = [Fault(match="/data/" if step == 2 else "")]
                group.barrier().wait()
                step += 1
                manager.save(step, state_at(step, mesh))
                manager.wait()
                over.fill_(step > 3 and time.monotonic() - began >= self.seconds)
                group.broadcast(over, 0).wait()
            if rank == 0:
                self.server.faults = []
            group.barrier().wait()
            assert manager.save(step + 1, state_at(step + 1, mesh))
            report = manager.wait()
            assert report is not None
            assert report.url.endswith(f"step-{step + 1}")
            assert all(isinstance(error, StorageError) for _, error in manager.failures)
            return [number for number, _ in manager.failures], manager.all_steps()


def check(loop: Loop) -> int:
    """Run the loop on all ranks, look at what is there, and return how many saves failed."""
    (failed, held), *others = run_ranks(WORLD, loop.run, seconds=loop.seconds + 180)
    assert others == [(failed, held)] * (WORLD - 1)
    assert failed == list(range(3, 3 + len(failed)))
    last = failed[-1] + 1
    assert held == (1, 2, last)
    with ckpt.open(f"{loop.url}/step-{last}", storage_options=loop.options) as checkpoint:
        assert torch.equal(checkpoint["w"][:], torch.full((ROWS, 100), float(last)))
    found = ckpt.verify(f"{loop.url}/step-{last}", storage_options=loop.options)
    assert not found.problems
    return len(failed)


def test_a_training_outlives_a_server_that_refuses_everything() -> None:
    with fake_s3() as server:
        assert check(Loop(server, 0.0)) == 2


def main() -> None:
    """Be refused for some minutes, with the pauses between requests that drivers really make."""
    minutes = float(sys.argv[1])
    with fake_s3() as server:
        failed = check(Loop(server, minutes * 60))
        print(f"refused for {minutes:g} minutes: {failed} saves failed, the next one is whole")


if __name__ == "__main__":
    main()
