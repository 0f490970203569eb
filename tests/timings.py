"""Pytest plugin: processor time of each test, and the slowest tests and files of a run.

Wall time says what a run waits for, processor time what it costs: on a busy machine only the latter
stays the same. The processor time of a test is that of this process and of all that descend from
it, also of those that servers fork for it. A test that was shorter than a look at those costs
leaves their time to the next one that was not. Not seen is what ends before its parent does
without being waited for.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from typing import Any

import pytest

SHOWN = 20
"""Tests and files that are listed."""

_PROPERTY = "processor_seconds"


_LOOK_AFTER = 0.5
"""Seconds after which a test looks at other processes again: that takes some milliseconds."""

_TICK = os.sysconf("SC_CLK_TCK")


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _descendants_seconds() -> float:
    """Processor time of the processes below this one, and of those that they have waited for."""
    below: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # What follows the name, which may hold anything: state, parent, ...
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # of one that has just ended
            continue
        below[int(fields[1])].append((int(entry), sum(map(int, fields[11:15]))))
    ticks, parents = 0, [os.getpid()]
    while parents:
        for pid, spent in below[parents.pop()]:
            ticks += spent
            parents.append(pid)
    return ticks / _TICK


class Timings:
    """Sums over the tests of a run, by test and by file."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.processor: defaultdict[str, float] = defaultdict(float)
        self._start = 0.0
        self._looked = time.monotonic()
        self._below = 0.0

    def _spent(self, start: float) -> float:
        """Seconds since ``start`` of this process, and of those below since the last look."""
        below = self._below
        if time.monotonic() - self._looked > _LOOK_AFTER:
            self._below = _descendants_seconds()
            self._looked = time.monotonic()
        return _processor_seconds() + self._below - start - below

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        """Note where the processor time of a test begins."""
        self._start = _processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Give the report of each phase the processor time that has passed since the last one."""
        report: pytest.TestReport = yield
        # Each report has properties of its own: the list of the item would grow with each phase.
        spent = self._spent(self._start)
        report.user_properties = [*report.user_properties, (_PROPERTY, spent)]
        self._start = _processor_seconds()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test; in a run of several processes the first one gets all reports."""
        self.wall[report.nodeid] += report.duration
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, float):
                self.processor[report.nodeid] += value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the slowest tests and files, and the processor time of all."""
        if len(self.wall) <= SHOWN:
            return
        files = _by_file(self.wall), _by_file(self.processor)
        for title, wall, processor in (
            ("tests", self.wall, self.processor),
            ("files", *files),
        ):
            terminalreporter.section(f"slowest {SHOWN} {title} (wall and processor seconds)")
            for name, seconds in _slowest(wall)[:SHOWN]:
                terminalreporter.write_line(f"{seconds:7.1f} {processor[name]:7.1f}  {name}")
        total = sum(self.processor.values())
        terminalreporter.write_line(
            f"tests took {total / 60:.1f} minutes of processor time, "
            f"{sum(self.wall.values()) / 60:.1f} of wall time added up over processes"
        )
        if path := os.environ.get("DTCKPT_TIMINGS"):
            lines = [
                f"{seconds:.2f}\t{self.processor[name]:.2f}\t{name}\n"
                for name, seconds in _slowest(self.wall)
            ]
            with open(path, "w") as file:
                file.writelines(lines)


def _slowest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: item[1], reverse=True)


def _by_file(seconds: dict[str, float]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        total[name.partition("::")[0]] += value
    return total


def pytest_configure(config: pytest.Config) -> None:
    """Add the plugin to a run, in each of its processes."""
    config.pluginmanager.register(Timings(), "dtckpt-timings")
