"""Starts the processes of the benchmark and collects what they measured."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from .frame.team import Team
from .worker import JOB_FILE, RESULT_FILE, TEAM_FOLDER, work

_CONTEXT = multiprocessing.get_context("forkserver")

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


class WorkersFailed(Exception):
    """Some processes of the benchmark ended badly."""


def on_ranks(
    task: Callable[[Team, Any], Any],
    job: object,
    ranks: int,
    what: str,
    directory: str | None = None,
) -> Any:
    """Return what ``task(team, job)`` returns on rank 0 of as many processes.

    The job and the result travel as JSON. The team may write into a folder in ``directory``. Raises
    WorkersFailed, which names ``what`` they were doing, where a process ends badly.
    """
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="dtckpt-bench-", dir=directory))
    try:
        (folder / JOB_FILE).write_text(json.dumps(job))
        (folder / TEAM_FOLDER).mkdir()
        # Imports torch once, and every rank starts from there.
        _CONTEXT.set_forkserver_preload([work.__module__, task.__module__])
        start = partial(_CONTEXT.Process, target=work)
        _run([start(args=(task, folder, rank, ranks)) for rank in range(ranks)], what)
        return json.loads((folder / RESULT_FILE).read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(processes: list[ForkServerProcess], what: str) -> None:
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
    """Let ranks inherit an environment with one thread each.

    They inherit it from the fork server, which starts with the first of them.
    """
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))  # where `tools` is found
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
