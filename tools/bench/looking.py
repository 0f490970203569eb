"""What it costs to look at a checkpoint: ``python -m tools.bench.looking``.

A checkpoint of 3,000 tensors is inspected by the command in processes of its own, and the values of
large tensors are summed up in this one. Times are medians.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import click
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.reading import limits

NUM_TENSORS = 3000
MAX_SECONDS = 1.0
"""The most that inspecting may take, from the start of the process to its end."""
MAX_IMPORT_SECONDS = 0.4
"""The most that all imports of it may."""
_IMPORT = re.compile(r"import time:\s+(\d+) \|")


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--size", "num_elements", default=1 << 26, show_default=True, metavar="ELEMENTS")
def main(rounds: int, num_elements: int) -> None:
    """Measure, and exit with 1 where a bar is missed."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tensors = {f"layers.{i}.weight": torch.zeros(64, 8) for i in range(NUM_TENSORS)}
        ckpt.save({"model": tensors, "step": 3}, place / "many")
        command = [sys.executable, "-m", "dtckpt", "inspect", str(place / "many")]
        whole, processor, imports = zip(*(_inspect(command) for _ in range(rounds)), strict=True)
        print(f"inspect of {NUM_TENSORS:,} tensors: {median(whole):.2f} s, at most {MAX_SECONDS} s")
        print(f"  of the processor: {median(processor):.2f} s")
        print(f"  all imports: {median(imports):.2f} s, at most {MAX_IMPORT_SECONDS} s")
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            values = {"values": (torch.randn(num_elements) * 1000).to(dtype)}
            ckpt.save(values, place / "large", overwrite=True)
            _statistics(place / "large", rounds)
            if dtype is torch.float32:
                _verify(place / "large", rounds)
                _compare(place, values["values"], rounds)
    if median(whole) > MAX_SECONDS or median(imports) > MAX_IMPORT_SECONDS:
        sys.exit(1)


def _inspect(command: list[str]) -> tuple[float, float, float]:
    """Return seconds of the process, of the processor, and of all imports."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - began, os.times()
    processor = sum(after[2:4]) - sum(before[2:4])
    told = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, check=True
    )
    return seconds, processor, sum(map(int, _IMPORT.findall(told.stderr))) / 1e6


def _statistics(place: Path, rounds: int) -> None:
    walls: list[float] = []
    processors: list[float] = []
    num_values = 0
    dtype = ""
    for _ in range(rounds):
        began, before = time.perf_counter(), time.process_time()
        (found,) = ckpt.statistics(place).values()
        num_values, dtype = found.num_values, found.dtype
        walls.append(time.perf_counter() - began)
        processors.append(time.process_time() - before)
    each = 1e9 / num_values
    print(
        f"statistics of {num_values:,} {dtype}: {median(walls):.2f} s, {median(walls) * each:.1f} "
        f"ns a value, {median(processors) * each:.1f} ns of the processor"
    )


def _verify(place: Path, rounds: int) -> None:
    """Compare a verification with bare reads of as many threads, one after the other."""
    [path] = place.glob("data/*/*")
    costs: dict[str, list[tuple[float, float]]] = {"raw": [], "verify": []}
    works = {"raw": lambda: _read(path), "verify": lambda: ckpt.verify(place)}
    for _ in range(rounds + 1):
        for name, work in works.items():
            began, before = time.perf_counter(), time.process_time()
            work()
            costs[name].append((time.perf_counter() - began, time.process_time() - before))
    for name, found in costs.items():
        walls, processors = zip(*found[1:], strict=True)  # the first has warmed the page cache
        print(
            f"{name} of {path.stat().st_size >> 20} MiB: {median(walls):.3f} s, "
            f"{median(processors):.3f} s of the processor"
        )


def _read(path: Path) -> None:
    """Read a file by pieces into buffers that are used again, one of each of four threads."""
    starts = iter(range(0, path.stat().st_size, limits.STAGED_BYTES))

    def work(fd: int) -> None:
        buffer = bytearray(limits.STAGED_BYTES)
        for start in starts:
            os.preadv(fd, [buffer], start)

    with path.open("rb") as file, ThreadPoolExecutor(limits.NUM_READERS) as pool:
        list(pool.map(work, [file.fileno()] * limits.NUM_READERS))


def _compare(place: Path, values: torch.Tensor, rounds: int) -> None:
    ckpt.save({"values": values + 1}, place / "other", overwrite=True)
    costs: list[tuple[float, float]] = []
    for _ in range(rounds):
        began, before = time.perf_counter(), time.process_time()
        ckpt.compare(place / "large", place / "other")
        costs.append((time.perf_counter() - began, time.process_time() - before))
    walls, processors = zip(*costs, strict=True)
    each = 1e9 / values.numel()
    print(
        f"compare of {values.numel():,} float32: {median(walls):.2f} s, "
        f"{median(processors) * each:.1f} ns of the processor a value"
    )


if __name__ == "__main__":
    main()
