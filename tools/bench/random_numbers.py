"""Random numbers beside torch's own generator: ``python -m tools.bench.random_numbers``.

Every row does the same to a DTensor on a mesh of one rank and to a plain tensor of its size, in
turn, and takes medians of processor time. How many threads there are is what ``OMP_NUM_THREADS``
says; torch draws most numbers with one.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import dtckpt.dtensor as dt
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh

from .machine import describe

BAR = 3.0
"""The most that a draw may take, over torch's own."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A draw, and what it is done to."""

    name: str
    draw: Callable[[Tensor], object]
    dtype: torch.dtype = torch.float32
    value: float = 0.3
    """What the tensor holds before, where that is a parameter."""
    most: int = 10**9
    """The largest size that the draw is defined for."""


DISTRIBUTIONS = (
    Distribution(name="uniform_", draw=lambda x: x.uniform_()),
    Distribution(name="uniform_, float64", draw=lambda x: x.uniform_(), dtype=torch.float64),
    Distribution(name="uniform_, bfloat16", draw=lambda x: x.uniform_(), dtype=torch.bfloat16),
    Distribution(name="uniform_(-2, 3)", draw=lambda x: x.uniform_(-2, 3)),
    Distribution(name="normal_", draw=lambda x: x.normal_()),
    Distribution(name="normal_, float64", draw=lambda x: x.normal_(), dtype=torch.float64),
    Distribution(name="normal_, bfloat16", draw=lambda x: x.normal_(), dtype=torch.bfloat16),
    Distribution(name="bernoulli_(0.3)", draw=lambda x: x.bernoulli_(0.3)),
    Distribution(name="bernoulli_(0.3), bool", draw=lambda x: x.bernoulli_(0.3), dtype=torch.bool),
    Distribution(name="random_(100), int64", draw=lambda x: x.random_(100), dtype=torch.int64),
    Distribution(name="random_(), int64", draw=lambda x: x.random_(), dtype=torch.int64),
    Distribution(name="exponential_", draw=lambda x: x.exponential_()),
    Distribution(name="geometric_(0.2)", draw=lambda x: x.geometric_(0.2)),
    Distribution(name="log_normal_", draw=lambda x: x.log_normal_()),
    Distribution(name="cauchy_", draw=lambda x: x.cauchy_()),
    Distribution(name="rand_like", draw=torch.rand_like),
    Distribution(name="randn_like", draw=torch.randn_like),
    Distribution(name="dropout(0.1)", draw=lambda x: F.dropout(x, 0.1)),
    Distribution(name="bernoulli of a tensor", draw=torch.bernoulli),
    Distribution(
        name="multinomial, 100 of them", draw=lambda x: torch.multinomial(x, 100), most=1 << 24
    ),
    Distribution(
        name="multinomial, replaced",
        draw=lambda x: torch.multinomial(x, x.numel(), True),
        most=1 << 24,
    ),
    Distribution(name="poisson, rate 3", draw=torch.poisson, value=3.0),
    Distribution(name="poisson, rate 100", draw=torch.poisson, value=100.0),
    Distribution(
        name="binomial of 100",
        draw=lambda x: torch.binomial(x, torch.full_like(x, 0.3)),
        value=100.0,
    ),
    Distribution(name="gamma, shape 2", draw=torch.ops.aten._standard_gamma, value=2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Seconds of processor time per call, by round."""

    name: str
    count: int
    ours: list[float] = field(default_factory=list[float])
    torch: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> float:
        """Median of ours over the median of torch's."""
        return median(self.ours) / median(self.torch)

    def told(self) -> str:
        """Return what a table says of it."""
        each = (f"{median(times) / self.count * 1e9:.2f}" for times in (self.ours, self.torch))
        verdict = "" if self.ratio <= BAR else " MISS"
        return f"{' / '.join(each)} = {self.ratio:.2f}{verdict}"


def measure(name: str, count: int, ours: Call, theirs: Call, rounds: int, seconds: float) -> Drawn:
    """Time two calls in turn, so often in a round that it takes about ``seconds``."""
    drawn = Drawn(name=name, count=count)
    calls = ((ours, drawn.ours), (theirs, drawn.torch))
    repeats: list[int] = []
    for call, _ in calls:
        call()
        repeats.append(max(1, round(seconds / max(_time(call, 1), 1e-6))))
    for _ in range(rounds):
        for (call, times), repeat in zip(calls, repeats, strict=True):
            times.append(_time(call, repeat))
    return drawn


def _time(call: Call, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def rows(counts: Sequence[int], names: Sequence[str], rounds: int, seconds: float) -> list[Drawn]:
    """Measure the distributions whose names have one of ``names``."""
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    found: list[Drawn] = []

    def add(name: str, count: int, ours: Call, theirs: Call) -> None:
        if any(part in name for part in names):
            found.append(measure(name, count, ours, theirs, rounds, seconds))

    for count in counts:
        for d in DISTRIBUTIONS:
            if count > d.most:
                continue
            plain = torch.full((count,), d.value, dtype=d.dtype)
            local = DTensor.from_local(plain.clone(), mesh)
            add(d.name, count, lambda d=d, x=local: d.draw(x), lambda d=d, x=plain: d.draw(x))
        for name in ("rand", "randn", "randperm"):
            ours, theirs = getattr(dt, name), getattr(torch, name)
            add(
                name,
                count,
                lambda make=ours, n=count: make(n, device_mesh=mesh),
                lambda make=theirs, n=count: make(n),
            )
    return found


def markdown(found: Sequence[Drawn]) -> str:
    """Return a table: nanoseconds per element, dtckpt / torch = ratio, a column for every size."""
    names = list(dict.fromkeys(row.name for row in found))
    counts = list(dict.fromkeys(row.count for row in found))
    told = {(row.name, row.count): row.told() for row in found}
    heading = ["draw", *(f"{count:,}" for count in counts)]
    rows = [[name, *(told.get((name, count), "") for count in counts)] for name in names]
    lines = [heading, ["---", *["---:"] * len(counts)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@click.command("random-numbers")
@click.option("--counts", default="10000,1000000,10000000", help="Elements of the tensors.")
@click.option("--rounds", default=9, type=click.IntRange(1), help="Timed rounds of a row.")
@click.option("--batch-seconds", default=0.01, help="What the calls of a round take together.")
@click.option(
    "--only", metavar="NAME[,NAME]", default="", help="Rows whose names have one of these."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all numbers.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write a table.")
def main(
    counts: str,
    rounds: int,
    batch_seconds: float,
    only: str,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Time random numbers of DTensors beside torch's own."""
    sizes = [int(float(count)) for count in counts.split(",")]
    found = rows(sizes, only.split(","), rounds, batch_seconds)
    machine: dict[str, Any] = describe(tempfile.gettempdir()) | {"threads": torch.get_num_threads()}
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    table = f"Machine: {facts}.\n\n{markdown(found)}"
    click.echo(table, nl=False)
    if markdown_file is not None:
        markdown_file.write_text(table)
    if json_file is not None:
        listed = [asdict(row) | {"ratio": row.ratio} for row in found]
        json_file.write_text(json.dumps({"machine": machine, "rows": listed}, indent=1))


if __name__ == "__main__":
    main()
