"""Random numbers beside torch's own generator: ``python -m tools.bench.random_numbers``.

Every row does the same to a DTensor on a mesh of one rank and to a plain tensor of its size, in
turn, and takes medians of processor time. How many threads there are is what ``OMP_NUM_THREADS``
says; torch draws most numbers with one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import dtckpt.dtensor as dt
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh

from .frame.machine import describe
from .frame.output import output_options, publish
from .frame.table import MISS, Grid
from .frame.timing import OURS, PEER, Batches, Call, Comparison, run_rounds

BAR = 3.0
"""The most that a draw may take, over torch's own."""


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
class Drawn(Comparison):
    """What a draw takes, in processor time."""

    count: int

    def told(self) -> str:
        """Return what a table says of it."""
        if self.ratio is None:
            return f"failed: {self.failed}"
        each = (f"{median(self.times[s]) / self.count * 1e9:.2f}" for s in (OURS, PEER))
        mark = "" if self.is_met else f" {MISS}"
        return f"{' / '.join(each)} = {self.ratio:.2f}{mark}"


def draws(count: int) -> Iterator[tuple[str, Call, Call]]:
    """Yield the name of every draw of so many elements, and its calls: ours, and torch's."""
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    for d in DISTRIBUTIONS:
        if count <= d.most:
            plain = torch.full((count,), d.value, dtype=d.dtype)
            local = DTensor.from_local(plain.clone(), mesh)
            yield d.name, partial(d.draw, local), partial(d.draw, plain)
    for name in ("rand", "randn", "randperm"):
        ours, theirs = getattr(dt, name), getattr(torch, name)
        yield name, partial(ours, count, device_mesh=mesh), partial(theirs, count)


def measure(name: str, count: int, calls: dict[str, Call], rounds: int, seconds: float) -> Drawn:
    """Time calls in turn, so often in a round that it takes about ``seconds``."""
    drawn = Drawn(name=name, count=count, bar=BAR)
    trial = Batches({side: lambda call=call: call for side, call in calls.items()}, seconds)
    run_rounds([(trial, drawn)], rounds)
    return drawn


def grid(found: Sequence[Drawn]) -> Grid:
    """Return a table with a column for every size."""
    counts = tuple(dict.fromkeys(row.count for row in found))
    told = {(row.name, row.count): row.told() for row in found}
    return Grid(
        title="Random numbers",
        what="Nanoseconds per element, ours / torch's = ratio.",
        headings=("draw", *(f"{count:,}" for count in counts)),
        rows=tuple(
            (name, *(told.get((name, count), "") for count in counts))
            for name in dict.fromkeys(row.name for row in found)
        ),
    )


@click.command("random-numbers")
@click.option("--counts", default="10000,1000000,10000000", help="Elements of the tensors.")
@click.option("--rounds", default=9, type=click.IntRange(1), help="Timed rounds of a row.")
@click.option("--batch-seconds", default=0.01, help="What the calls of a round take together.")
@click.option(
    "--only", metavar="NAME[,NAME]", default="", help="Rows whose names have one of these."
)
@output_options
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
    found = [
        measure(name, count, {OURS: ours, PEER: theirs}, rounds, batch_seconds)
        for count in sizes
        for name, ours, theirs in draws(count)
        if any(part in name for part in only.split(","))
    ]
    machine = describe(tempfile.gettempdir()) | {"threads": torch.get_num_threads()}
    document = {"machine": machine, "rows": [row.to_json() for row in found]}
    publish([grid(found)], document, json_file, markdown_file)


if __name__ == "__main__":
    sys.exit(main())
