"""Ranks that load from the memory of agents after some of them were killed. Run by test_living.

One process imports torch and forks all ranks: four on two hosts, which are two agents that reach
each other by TCP alone. It prints one JSON object for each run of ranks: how they ended, and what
they have computed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Layout, Mesh, Shard
from dtckpt.errors import CheckpointError
from dtckpt.storage import agent_status, start_agent, stop_agent
from dtckpt.storage.peers.stream import PeersStream

from ..ranks import _c10d as c10d  # pyright: ignore[reportPrivateUsage]
from ..ranks import gloo_group

ROWS, COLUMNS = 1001, 257
JOB = "living"


class Job:
    """A run of some ranks, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self._num_runs = 0

    def run(self, hosts: str, body: Callable[[Job, int, Any, str], object]) -> dict[str, Any]:
        """Run ``body`` on a rank for each host and return what the ranks have told."""
        self._num_runs += 1
        case = self.folder / f"run{self._num_runs}"
        case.mkdir()
        pids = [self._fork(case, rank, hosts, body) for rank in range(len(hosts))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        notes = [case / f"rank{rank}" for rank in range(len(hosts))]
        told = [json.loads(note.read_text()) if note.exists() else None for note in notes]
        return {"run": body.__name__, "codes": codes, "told": told}

    def _fork(self, case: Path, rank: int, hosts: str, body: Any) -> int:
        if pid := os.fork():
            return pid
        try:
            store = c10d.FileStore(str(case / "rendezvous"), len(hosts))
            group = gloo_group(store, rank, len(hosts), timedelta(seconds=30))
            told = body(self, rank, group, hosts[rank])
            (case / f"rank{rank}").write_text(json.dumps(told))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def options(self, host: str) -> dict[str, Any]:
        """How ranks of a host open ``peers://``."""
        return {"registry": str(self.folder / "registry"), "host": host, "timeout": 10.0}

    def kill_agent(self, host: str) -> None:
        """End the agent of a host as a host ends that loses its power."""
        status = agent_status(JOB, **self.options(host))
        if status is not None:
            os.kill(status.pid, signal.SIGKILL)
            while (Path("/proc") / str(status.pid) / "fd").exists():
                time.sleep(0.01)


class Trainer:
    """Training of which every element comes out the same on any number of ranks."""

    def __init__(self, rank: int, group: Any) -> None:
        self.group = group
        size = group.size()
        layout = Layout(Mesh((size,)), (Shard(0),), (ROWS, COLUMNS))
        self.start = layout.box((rank,)).offsets[0]
        local = torch.zeros(layout.box((rank,)).sizes)
        self.state: dict[str, Any] = {"w": local, "moment": torch.zeros_like(local), "step": 0}
        layouts: Any = {"w": layout, "moment": layout}
        self.shared = ckpt.with_layouts(self.state, layouts, rank=rank)

    def step(self) -> None:
        """Make one step."""
        self.shared["step"] += 1
        w, moment = self.state["w"], self.state["moment"]
        rows = torch.arange(self.start, self.start + len(w)).double()[:, None]
        gradient = torch.sin(rows + self.shared["step"]) * torch.ones(COLUMNS)
        moment.mul_(0.9).add_(gradient.float())
        w.sub_(0.01 * moment)

    def told(self) -> list[Any]:
        """What of the state is compared: the step, and exact sums of the rows that it holds."""
        rows = self.state["w"].double().sum(1)
        return [self.shared["step"], self.start, rows.tolist()]

    def save(self, root: str, options: dict[str, Any]) -> None:
        ckpt.save(
            self.shared,
            f"{root}/step-{self.shared['step']}",
            process_group=self.group,
            storage_options=options,
        )

    def resume(self, root: str, options: dict[str, Any]) -> ckpt.LoadReport:
        newest = ckpt.latest(root, process_group=self.group, storage_options=options)
        assert newest is not None
        return ckpt.load(self.shared, newest.url, process_group=self.group, storage_options=options)


class Alone:
    """The group of a process that trains without others."""

    def size(self) -> int:
        return 1


def uninterrupted() -> list[Any]:
    """Six steps."""
    trainer = Trainer(0, Alone())
    for _ in range(6):
        trainer.step()
    return trainer.told()


def first_run(job: Job, rank: int, group: Any, host: str) -> object:
    """Steps 1 and 2 are saved to disk and memory; rank 3 is killed while it saves step 3."""
    trainer = Trainer(rank, group)
    for _ in range(2):
        trainer.step()
        trainer.save(str(job.disk), {})
        trainer.save(f"peers://{JOB}", job.options(host))
    trainer.step()
    if rank == 3:
        kill_in_a_write()
    try:
        trainer.save(f"peers://{JOB}", job.options(host))
    except CheckpointError as error:
        return type(error).__name__
    return "saved"


def kill_in_a_write() -> None:
    """Let this process be killed by the next bytes that it writes to its agent."""

    def die(self: PeersStream, view: memoryview) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    PeersStream._append = die  # pyright: ignore[reportPrivateUsage]


def resumed(job: Job, rank: int, group: Any, host: str) -> object:
    """Load the newest from memory and go on to step 6, without saving any more."""
    trainer = Trainer(rank, group)
    report = trainer.resume(f"peers://{JOB}", job.options(host))
    loaded = trainer.shared["step"]
    while trainer.shared["step"] < 6:
        trainer.step()
    return {
        "loaded": loaded,
        "bytes_read": report.bytes_read,
        "needed": report.bytes_needed,
        "end": trainer.told(),
    }


def from_disk(job: Job, rank: int, group: Any, host: str) -> object:
    """Find nothing in memory, and load from the disk."""
    trainer = Trainer(rank, group)
    try:
        newest = ckpt.latest(
            f"peers://{JOB}", process_group=group, storage_options=job.options(host)
        )
        told = str(newest)
    except CheckpointError as error:
        told = type(error).__name__
    try:
        ckpt.load(
            trainer.shared,
            f"peers://{JOB}/step-2",
            process_group=group,
            storage_options=job.options(host),
        )
        named = "loaded"
    except CheckpointError as error:
        named = type(error).__name__
    trainer.resume(str(job.disk), {})
    while trainer.shared["step"] < 6:
        trainer.step()
    return {"latest": told, "load": named, "end": trainer.told()}


@contextmanager
def hidden(path: Path) -> Generator[None]:
    """Take a directory away, so that nothing can be read there."""
    away = path.with_name("away")
    shutil.move(path, away)
    yield
    shutil.move(away, path)


def main(folder: Path) -> None:
    """Run all and print what ranks tell."""
    os.environ["DTCKPT_HOST"] = "127.0.0.1"
    job = Job(folder)

    def show(name: str, outcome: dict[str, Any]) -> None:
        print(json.dumps({"name": name} | outcome), flush=True)

    try:
        show("uninterrupted", {"codes": [0], "told": [uninterrupted()]})
        for host in "ab":
            start_agent(JOB, budget_bytes=64 << 20, **job.options(host))
        show("first", job.run("aabb", first_run))
        with hidden(job.disk):
            show("replacement", job.run("aabb", resumed))
            show("three ranks", job.run("aab", resumed))
            show("a host without an agent", job.run("xy", resumed))
            job.kill_agent("a")
            show("a host has died", job.run("bbxx", resumed))
        job.kill_agent("b")
        show("all have died", job.run("aab", from_disk))
    finally:
        for host in "ab":
            stop_agent(JOB, **job.options(host))


if __name__ == "__main__":
    torch.set_num_threads(1)
    LOADED = (ckpt.save, ckpt.load, ckpt.latest, PeersStream)  # what all ranks need, once
    main(Path(sys.argv[1]))
