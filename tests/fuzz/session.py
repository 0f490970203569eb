"""A hunt: workers in processes of their own, of which one that hangs or dies is a finding, too."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from .generator import program_of

STUCK_SECONDS = 600
"""How long a worker may take for one program, shrunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is run."""

    seed: int = 1
    start: int = 0
    only: frozenset[str] = frozenset()
    minutes: float = 3.0
    jobs: int = 1
    compiled: float = 0.0


@dataclass
class Tally:
    """What has come of a hunt so far."""

    programs: int = 0
    lines: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    found: dict[tuple[str, str], list[dict[str, Any]]] = field(
        default_factory=dict[tuple[str, str], list[dict[str, Any]]]
    )


def hunt(settings: Settings, *, stop_at_first: bool = False, report: Path | None = None) -> bool:
    """Run programs for the minutes that are set; whether some differ."""
    tally, began = Tally(), time.monotonic()
    until = began + 60 * settings.minutes
    events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    workers = [Worker(job, settings, settings.start + job, events) for job in range(settings.jobs)]
    try:
        while time.monotonic() < until:
            for worker in workers:
                worker.look(until)
            try:
                job, entry = events.get(timeout=1)
            except queue.Empty:
                continue
            if entry is None:
                continue
            workers[job].at = entry.get("at", workers[job].at)
            workers[job].seen_at = time.monotonic()
            is_new = _note(tally, entry, time.monotonic() - began, report)
            if is_new and stop_at_first:
                break
    finally:
        for worker in workers:
            worker.stop()
    _summarise(tally, time.monotonic() - began)
    return bool(tally.found)


def _note(tally: Tally, entry: dict[str, Any], seconds: float, report: Path | None) -> bool:
    """Count what a worker has told; whether it is a finding of a new kind."""
    if "ran" in entry:
        tally.programs += 1
        tally.lines += entry["lines"]
    if "refused" in entry:
        tally.refused[tuple(entry["refused"])] += 1
    found = entry.get("found")
    if found is None:
        return False
    found = {**found, "number": entry["ran"], "seconds": entry.get("cpu_seconds", seconds)}
    same = tally.found.setdefault((found["kind"], found["operator"]), [])
    same.append(found)
    if report is not None:
        with report.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
    if len(same) == 1:
        click.echo(
            f"\n{found['kind']} at {found['operator']} (program {found['number']}, "
            f"{found['seconds']:.0f} s)\n{found['text'][:600]}\n{found['program']}"
        )
    return len(same) == 1


def _summarise(tally: Tally, seconds: float) -> None:
    click.echo(
        f"\n{tally.programs} programs, {tally.lines} lines in {seconds:.0f} s: "
        f"{len(tally.found)} kinds of findings, {tally.refused.total()} refused"
    )
    for (kind, operator), same in tally.found.items():
        click.echo(f"  {len(same):4} {kind} at {operator} (program {same[0]['number']})")
    for (operator, text), count in tally.refused.most_common(12):
        click.echo(f"  {count:4} refused at {operator}: {text}")


class Worker:
    """A process, started again behind the program at which it ended or stands still."""

    def __init__(self, job: int, settings: Settings, start: int, events: queue.Queue[Any]) -> None:
        self._job, self._settings, self._events = job, settings, events
        self.at = start
        self._start(start)

    def _start(self, number: int) -> None:
        settings = self._settings
        command = [sys.executable, "-m", "tests.fuzz", "--worker", "--seed", str(settings.seed)]
        command += ["--start", str(number), "--jobs", str(settings.jobs)]
        command += ["--minutes", str(settings.minutes), "--compiled", str(settings.compiled)]
        if settings.only:
            command += ["--only", ",".join(sorted(settings.only))]
        self.at, self.seen_at = number, time.monotonic()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._events.put((self._job, json.loads(line)))

    def look(self, until: float) -> None:
        """Start anew where the process has ended too early, or stands still."""
        ended = self._process.poll()
        is_stuck = time.monotonic() - self.seen_at > STUCK_SECONDS
        if not is_stuck and (ended is None or time.monotonic() > until - 5):
            return
        self.stop()
        found = {
            "kind": "stuck" if is_stuck else "crash",
            "operator": "",
            "text": "stands still" if is_stuck else f"the process ended with {ended}",
            "program": repr(program_of(self._settings.seed, self.at, self._settings.only)),
        }
        self._events.put((self._job, {"ran": self.at, "lines": 0, "found": found}))
        self._start(self.at + self._settings.jobs)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
