"""Real signals to real jobs of ``torchrun``: whoever gets them, all ranks save the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import dtckpt.checkpoint as dcp
from tests.python import ROOT
from tests.waiting import wait_for


class Job:
    """A job of ``torchrun``, and what its ranks have written."""

    def __init__(self, folder: Path, size: int, *options: str, **variables: str) -> None:
        self.root = folder / "run"
        self.logs = folder / "logs"
        self.size = size
        self.logs.mkdir(exist_ok=True)
        module = "tests.checkpoint.manager.signalled_job"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={size}", "--monitor-interval=0.1", *options]
        self.output = (folder / f"output{size}.txt").open("w+")
        self.launcher = subprocess.Popen(
            [*launcher, "-m", module, str(self.root), str(self.logs)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def told(self, rank: int, restart: int = 0) -> list[list[str]]:
        """Return what a rank has written, a list of words for each line."""
        path = self.logs / f"{self.size}.{restart}.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split() for line in lines]

    def wait_for_lines(self, number: int, restart: int = 0) -> list[list[str]]:
        """Wait until all ranks have written so many lines, and return the last of each."""

        def all_told() -> bool:
            has_ended = self.launcher.poll() is not None
            told = all(len(self.told(rank, restart)) >= number for rank in range(self.size))
            assert told or not has_ended, self.text()
            return told

        wait_for(all_told, 90)
        return [self.told(rank, restart)[number - 1] for rank in range(self.size)]

    def pid(self, rank: int, restart: int = 0) -> int:
        """Return the process of a rank."""
        return int(self.told(rank, restart)[0][2])

    def end(self) -> int:
        """Wait for the launcher's end and return how it has ended."""
        return self.launcher.wait(60)

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()[-5000:]


@contextmanager
def job(folder: Path, size: int, *options: str, **variables: str) -> Generator[Job]:
    made = Job(folder, size, *options, **variables)
    try:
        yield made
    finally:
        with suppress(ProcessLookupError):
            os.killpg(made.launcher.pid, signal.SIGKILL)
        for log in made.logs.glob(f"{size}.*"):  # workers are in sessions of their own
            line = log.read_text().split()
            if len(line) > 2:
                with suppress(ProcessLookupError):
                    os.kill(int(line[2]), signal.SIGKILL)
        made.launcher.wait()
        made.output.close()


def same_save(lines: list[list[str]], reason: str) -> int:
    """Return the step that all ranks have saved for a reason."""
    (line,) = {tuple(each) for each in lines}
    what, step, why = line
    assert (what, why) == ("saved", reason)
    return int(step)


def check(root: Path, step: int) -> None:
    state: dict[str, Any] = {"w": torch.zeros(8), "step": 0}
    dcp.load(state, root / f"step-{step}")
    assert state["step"] == step
    assert state["w"].tolist() == [float(step)] * 8


def test_signals_to_workers_and_to_the_launcher(tmp_path: Path) -> None:
    # The store of the launcher outlives a restart, and torch 2.13 then finds old addresses there
    # (pytorch issue 135712); so that of rank 0 serves here, and the launcher's in the second job.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with job(tmp_path, 2, "--max-restarts=1", **own_store) as first:
        first.wait_for_lines(1)
        os.kill(first.pid(1), signal.SIGUSR1)  # one rank alone: all save, and go on
        one = same_save(first.wait_for_lines(2), "SIGUSR1")
        check(first.root, one)
        os.kill(first.pid(0), signal.SIGUSR1)
        two = same_save(first.wait_for_lines(3), "SIGUSR1")
        assert two > one
        os.kill(first.pid(1), signal.SIGKILL)  # an elastic restart, in new processes
        begun = first.wait_for_lines(1, restart=1)
        assert [line[:2] for line in begun] == [["begins", str(two)]] * 2
        os.kill(first.launcher.pid, signal.SIGTERM)  # which passes it on to all ranks
        first.end()
        three = same_save(first.wait_for_lines(2, restart=1), "SIGTERM")
        assert [line[0] for line in first.wait_for_lines(3, restart=1)] == ["ends", "ends"]
        assert three > two
        check(first.root, three)
    with job(tmp_path, 3) as second:  # another launch, with another world size
        begun = second.wait_for_lines(1)
        assert [line[:2] for line in begun] == [["begins", str(three)]] * 3
        os.kill(second.pid(2), signal.SIGTERM)  # one rank alone: all save and end
        assert second.end() == 0, second.text()
        four = same_save(second.wait_for_lines(2), "SIGTERM")
        assert four > three
        check(second.root, four)
