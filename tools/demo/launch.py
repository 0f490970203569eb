"""Starts what the demo runs: training jobs under torchrun, and the ``dtckpt`` command."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dtckpt.tools.cli.common.console import iec

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.1
_END_SECONDS = 40
_CLI_SECONDS = 120
_TAIL_LINES = 40


class ChildFailed(Exception):
    """A process that the demo started did not do what it was to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training job: who takes part, how far it goes, and who dies on the way."""

    name: str
    worker: str
    """The module that every rank runs."""
    checkpoints: Path
    ranks: int
    mesh: str
    steps: int
    save_every: int
    kill_rank: int | None = None
    kill_step: int | None = None

    def arguments(self) -> list[str]:
        """Return the worker's arguments."""
        values = {
            "--checkpoints": self.checkpoints,
            "--mesh": self.mesh,
            "--steps": self.steps,
            "--save-every": self.save_every,
            "--kill-rank": self.kill_rank,
            "--kill-step": self.kill_step,
        }
        return [str(part) for pair in values.items() if pair[1] is not None for part in pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training job ended and what its ranks told."""

    exit_code: int
    log: str
    """What torchrun and all ranks printed."""
    events: tuple[dict[str, Any], ...]
    errors: Mapping[int, dict[str, Any]]
    """Type, message and time of the error that a rank told."""

    def losses(self) -> dict[int, float]:
        """Return the loss of every step."""
        return {event["step"]: event["loss"] for event in self.events if event["event"] == "step"}

    def resumed(self) -> dict[str, Any]:
        """Return what was told about resuming; ChildFailed where the job began anew."""
        for event in self.events:
            if event["event"] == "resume":
                return event
        raise ChildFailed("the job was to resume from a checkpoint, but it began anew")


class Launcher:
    """Runs children one at a time, keeps their output under ``logs`` and shows how they get on."""

    def __init__(self, console: Console, logs: Path, corpus: Path) -> None:
        self._console = console
        self._logs = logs
        self._corpus = corpus

    def train(self, job: Training) -> Outcome:
        """Run a training job to its end; unless a rank is to die, it must end well."""
        log, events = self._logs / f"{job.name}.log", self._logs / f"{job.name}.events"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(job.ranks), "-m", job.worker]
        command += ["--corpus", str(self._corpus), "--events", str(events), *job.arguments()]
        with log.open("w") as output, _child(command, output) as process:
            found = self._follow(process, job, events)
        text = log.read_text(errors="replace")
        if process.returncode and job.kill_rank is None:
            raise ChildFailed(
                f"{job.name} ended with {process.returncode}; {log} says:\n{last_words(text)}"
            )
        errors = {
            rank: json.loads(path.read_text())
            for rank in range(job.ranks)
            if (path := Path(f"{events}.rank{rank}")).exists()
        }
        return Outcome(exit_code=process.returncode, log=text, events=tuple(found), errors=errors)

    def _follow(
        self, process: subprocess.Popen[str], job: Training, path: Path
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with self._console.status(f"{job.name}: starting {job.ranks} ranks") as status:
            running = True
            while running:
                running = process.poll() is None
                text = path.read_text() if path.exists() else ""
                lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
                for line in lines[len(found) :]:
                    found.append(json.loads(line))
                    status.update(f"{job.name}: {_shown(found[-1])}")
                    if found[-1]["event"] != "step":
                        self._console.print(f"         {_shown(found[-1])}", style="dim")
                if running:
                    time.sleep(_POLL_SECONDS)
        return found

    def command(self, *arguments: str, secrets: Mapping[str, str] | None = None) -> str:
        """Run ``dtckpt`` with arguments and return its output; ChildFailed if it fails.

        ``secrets`` are set in its environment, where a command line would show them to everybody.
        """
        self._console.print(f"  $ dtckpt {shlex.join(arguments)}", style="bold", markup=False)
        script = Path(sysconfig.get_path("scripts")) / "dtckpt"
        width = {"COLUMNS": str(self._console.width - 2)}
        try:
            done = subprocess.run(
                [str(script), *arguments],
                env=_environment() | width | dict(secrets or {}),
                text=True,
                capture_output=True,
                timeout=_CLI_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ChildFailed(f"{script} could not be run: {error}") from error
        if done.returncode:
            raise ChildFailed(f"it ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def last_words(log: str) -> str:
    """Return the end of what the ranks printed, and what torchrun says of the first to fail."""
    words, found, report = log.partition("Root Cause (first observed failure):")
    lines = words.splitlines()
    own = (n for n, line in enumerate(lines) if "torch/distributed/elastic/multiproc" in line)
    end = next(own, len(lines))
    return "\n".join([*lines[max(end - _TAIL_LINES, 0) : end], found + report]).strip()


@contextmanager
def _child(command: list[str], output: Any) -> Generator[subprocess.Popen[str]]:
    """Start a process and see to it that it has ended when the block has."""
    process = subprocess.Popen(
        command, env=_environment(), stdout=output, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of children: one thread each, and nothing leaves the machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))  # where `tools` is found
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return environment


def _shown(event: dict[str, Any]) -> str:
    match event["event"]:
        case "step":
            return f"step {event['step']}, loss {event['loss']:.3f}"
        case "save":
            size, stall = iec(event["bytes"]), event["stall"]
            took = f"{event['seconds']:.2f} s, the training waited {stall:.2f} s"
            return f"saved step {event['step']}: {size} in {took}"
        case _:
            return f"resumed from step {event['step']}, loaded in {event['seconds']:.2f} s"
