"""Programs do not outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .server import free_port, leashed, scratch, wait_for

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
SOURCE = """
import sys, time
from tests.servers.server import leashed, scratch
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
with scratch("leash") as folder, leashed(command, folder):
    print(folder, flush=True)
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int, folder: Path | None = None) -> None:
    until = time.monotonic() + 60
    while is_alive(pid) or (folder is not None and folder.exists()):
        assert time.monotonic() < until
        time.sleep(0.02)


def pid_in(folder: Path) -> int:
    """Return what the program has said."""
    (output,) = folder.glob("*.out")
    until = time.monotonic() + 60
    while not (said := output.read_text()).endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return int(said)


def test_a_killed_process_takes_its_programs_along() -> None:
    started = subprocess.Popen([sys.executable, "-c", SOURCE], stdout=subprocess.PIPE, text=True)
    with started:
        assert started.stdout is not None
        folder = Path(started.stdout.readline().strip())
        pid = pid_in(folder)
        assert is_alive(pid)
        started.send_signal(signal.SIGKILL)
        started.wait(60)
        wait_until_gone(pid, folder)


def test_a_program_ends_with_the_block() -> None:
    command = [sys.executable, "-c", SLEEPS]
    with scratch("leash") as folder:
        with leashed(command, folder):
            pid = pid_in(folder)
        assert not is_alive(pid)
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_does_not_outlive_its_leash(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SLEEPS]
    with scratch("leash") as folder:
        with leashed(command, folder) as running:
            pid = pid_in(folder)
            running.send_signal(number)
            running.wait(60)
        wait_until_gone(pid)


def test_a_program_that_does_not_start_is_told_of() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such setting')"]
    with (
        scratch("leash") as folder,
        leashed(command, folder) as running,
        pytest.raises(RuntimeError, match="no such setting"),
    ):
        wait_for(free_port(), running, folder)
