"""Environments of their own for parts of the tests: filled by pip, run, and told of."""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
T = TypeVar("T")
_SHOWN = 4000
"""Characters that are shown of what pip says when it fails."""


class NotInstalled(Exception):
    """pip could not install what is needed, for the reason that it gives."""


class NotAvailable(Exception):
    """What this machine cannot get, and why: its tests are skipped."""


def install(python: Path, *choices: str, **variables: str) -> None:
    """Let the pip of an environment install what is chosen; NotInstalled if it does not."""
    command = [str(python), "-m", "pip", "install", "--quiet", *choices]
    done = subprocess.run(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)}\n{done.stdout[-_SHOWN:]}")


def run_tests(python: Path, choices: Sequence[str], seconds: float, **variables: str) -> str:
    """Run pytest with the Python of an environment and return the last line of its report."""
    command = [str(python), "-m", "pytest", "-q", *choices]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        limit = threading.Timer(seconds, process.kill)
        limit.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
        code = process.wait()
        is_over = limit.is_alive()
        limit.cancel()
    if not is_over:
        return f"FAILED: not over after {seconds:.0f} s"
    return last if code == 0 else f"FAILED: {last}"


def run_each(
    every: Sequence[T], run: Callable[[T, float], str], about: str, *, seconds: float
) -> int:
    """Run those that the command line names, all by default; return 1 if some failed."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    names = [str(one) for one in every]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--turn", type=int, help=f"run {PER_TURN} of them, chosen by this number")
    parser.add_argument("--seconds", type=float, default=seconds, help="limit for each one's tests")
    parser.add_argument("--record", type=Path, help="append the results to a file, a line each")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"none of {', '.join(names)}: {', '.join(sorted(unknown))}")
    chosen = options.names or names
    if options.turn is not None:
        chosen = names_of_turn(names, options.turn)
    results = {str(one): _run(run, one, options.seconds) for one in every if str(one) in chosen}
    lines = [f"{name}: {result}" for name, result in results.items()]
    print("\n".join(lines))
    if options.record:
        with options.record.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    return 1 if any("FAILED" in result for result in results.values()) else 0


PER_TURN = 2
"""Environments that are tested where they take turns by commit."""


def names_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the names that a turn tests: ``PER_TURN`` of them, the next ones at the next turn.

    >>> names_of_turn(["a", "b", "c"], 1)
    ['c', 'a']
    """
    first = turn * PER_TURN
    return [names[(first + step) % len(names)] for step in range(min(PER_TURN, len(names)))]


def _run(run: Callable[[T, float], str], one: T, seconds: float) -> str:
    """Prepare and test one environment; return the result and how long it took."""
    print(f"== {one}", flush=True)
    start = time.monotonic()
    try:
        result = run(one, seconds)
    except NotAvailable as error:
        result = f"skipped: {error}"
    except NotInstalled as error:
        print(error)
        result = "FAILED: cannot be installed"
    return f"{result} ({time.monotonic() - start:.0f} s)"
