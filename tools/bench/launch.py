"""Starts the processes of the benchmark and collects what they measured."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from .row import Outcome, Row
from .setting import Setting
from .worker import work

_CONTEXT = multiprocessing.get_context("forkserver")

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


class WorkersFailed(Exception):
    """Some processes of the benchmark ended badly."""


def run(rows: Iterable[Row], setting: Setting) -> Iterator[tuple[list[Row], dict[str, Outcome]]]:
    """Yield the outcomes of all rows, one launch of processes after the other."""
    for ranks, together in _launches(rows, setting):
        yield together, _launch(together, ranks, setting)


def _launches(rows: Iterable[Row], setting: Setting) -> list[tuple[int, list[Row]]]:
    """Return rows that share processes: neighbours of one size that need no fresh ones."""
    launches: list[tuple[int, list[Row]]] = []
    for row in rows:
        ranks = row.ranks(setting)
        shared = [known for size, known in launches if size == ranks and not known[0].fresh]
        if shared and not row.fresh:
            shared[0].append(row)
        else:
            launches.append((ranks, [row]))
    return launches


def _launch(rows: list[Row], ranks: int, setting: Setting) -> dict[str, Outcome]:
    Path(setting.directory).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="dtckpt-bench-", dir=setting.directory))
    try:
        names = [row.name for row in rows]
        job = {"setting": asdict(setting), "ranks": ranks, "rows": names}
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "checkpoints").mkdir()
        run_processes(work, folder / "job.json", ranks, ", ".join(names))
        outcomes = json.loads((folder / "outcomes.json").read_text())
        return {name: Outcome(**outcomes[name]) for name in names}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_processes(target: Callable[[Path, int], None], job: Path, ranks: int, what: str) -> None:
    """Call ``target`` with the job's file and the rank in as many processes; wait for all.

    Raises WorkersFailed, which names ``what`` they were doing, where one ends badly.
    """
    # Imports torch once, and every rank starts from there.
    _CONTEXT.set_forkserver_preload([target.__module__])
    processes = [_CONTEXT.Process(target=target, args=(job, rank)) for rank in range(ranks)]
    with _environment():
        for process in processes:
            process.start()
    try:
        codes = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(codes):
        raise WorkersFailed(f"{what}: the ranks ended with {codes}")


def _wait(processes: list[ForkServerProcess]) -> list[int | None]:
    """Return the exit codes; once one process has failed the others get a few seconds more."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes:
            return codes
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return [process.exitcode for process in processes]


@contextmanager
def _environment() -> Generator[None]:
    """Let ranks inherit an environment with one thread each, in which nothing leaves the machine.

    They inherit it from the fork server, which starts with the first of them.
    """
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))  # where `tools` is found
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
