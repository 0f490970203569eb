"""What it costs to write a checkpoint anew: ``python -m tools.bench.rewriting``.

A checkpoint of 8 ranks, cut by rows, is resharded to a mesh of 2 x 2 by the command, in processes
of its own, beside ``cp`` of the same files. Reads come from the page cache, the rounds take turns,
times are medians.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import torch

import dtckpt.checkpoint as ckpt

MAX_RATIO = 1.5
"""The most that resharding may take, of the time of ``cp``."""
MAX_BYTES = 512 << 20
"""The most memory that all processes of it may hold at once."""
_LAYER = (4096, 4096)
_COMMAND = (sys.executable, "-m", "dtckpt", "reshard")


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--size", "gibibytes", default=4.0, show_default=True, metavar="GIB")
@click.option("--place", type=Path, default=None, help="A folder of the disk that is measured.")
@click.option("--processes", type=int, default=None, help="As many as the command takes by itself.")
def main(rounds: int, gibibytes: float, place: Path | None, processes: int | None) -> None:
    """Measure, and exit with 1 where a bar is missed."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        source = _source(folder, gibibytes)
        reshard = [*_COMMAND, "--quiet", source, folder / "reshard", "--mesh", "dp=2,tp=2"]
        reshard += ["--placements", "*=S(0),S(1)"]
        if processes is not None:
            reshard += ["--processes", processes]
        copied = folder / "copied"
        works = {
            "cp": ["cp", "-r", source, copied],
            "cp, synced": ["sh", "-c", f"cp -r {source} {copied} && sync -f {copied}"],
            "reshard": reshard,
        }
        seconds: dict[str, list[float]] = {work: [] for work in works}
        for number in range(rounds + 1):  # the first warms the page cache
            for work, command in works.items():
                taken = _run(command)
                if number:
                    seconds[work].append(taken)
                for made in (copied, folder / "reshard"):
                    shutil.rmtree(made, ignore_errors=True)
                os.sync()
        peak = _peak_bytes(reshard)
    for work, taken in seconds.items():
        print(f"{work}: {median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})")
    ratio = median(seconds["reshard"]) / median(seconds["cp"])
    print(f"reshard / cp: {ratio:.2f}, at most {MAX_RATIO}")
    print(f"memory of all processes: {peak >> 20} MiB, at most {MAX_BYTES >> 20} MiB")
    if ratio > MAX_RATIO or peak > MAX_BYTES:
        sys.exit(1)


def _source(folder: Path, gibibytes: float) -> Path:
    """Save layers of random values, and return where they are as 8 ranks would have saved them."""
    count = max(round(gibibytes * (1 << 30) / (_LAYER[0] * _LAYER[1] * 2)), 1)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_LAYER, generator=generator).bfloat16()
    state = {f"layers.{i}.weight": values.roll(i + 1) for i in range(count)}
    ckpt.save(state, folder / "whole")
    source = folder / "source"
    _run(
        [*_COMMAND, "--quiet", folder / "whole", source, "--mesh", "x=8", "--placements", "*=S(0)"]
    )
    shutil.rmtree(folder / "whole")
    os.sync()
    return source


def _run(command: Sequence[object]) -> float:
    began = time.perf_counter()
    subprocess.run([*map(str, command)], check=True)
    return time.perf_counter() - began


def _peak_bytes(command: Sequence[object]) -> int:
    """Run a command, and return the most memory that it and its children held at one time.

    What processes share is divided among them, as ``Pss`` in proc_pid_smaps_rollup(5).
    """
    process = subprocess.Popen([*map(str, command)])
    peak = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, sum(map(_proportional_bytes, _family(process.pid))))

    looking = threading.Thread(target=look)
    looking.start()
    code = process.wait()
    ended.set()
    looking.join()
    if code:
        raise subprocess.CalledProcessError(code, process.args)
    return peak


def _family(pid: int) -> list[int]:
    """Return a process and all that come from it."""
    found = [pid]
    for one in found:
        try:
            told = Path(f"/proc/{one}/task/{one}/children").read_text()
        except OSError:  # it has ended
            continue
        found += map(int, told.split())
    return found


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
