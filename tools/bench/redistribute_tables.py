"""The results of the benchmark of redistribute as tables, for people and as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from dtckpt.tools.cli.console import iec

from .redistribute_links import Link
from .redistribute_simulated import PlanTimes, Simulated
from .redistribute_wall import BAR, OURS, PEER, SHARD_TO_SHARD_BAR, SIZES, Timed

COLD_PLAN_SECONDS, CACHED_PLAN_SECONDS = 200e-6, 5e-6
"""What a plan may take on three axes, in the median: made, and looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of text."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    """So many columns at the start are text, the others are numbers."""

    def markdown(self) -> str:
        """Return it as Markdown."""
        rules = ["---" if i < self.texts else "---:" for i in range(len(self.headings))]
        lines = [self.headings, rules, *self.rows]
        body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return f"**{self.title}**\n\n{body}"

    def rich(self) -> Table:
        """Return it as a table for a console."""
        table = Table(title=self.title, title_justify="left")
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if i < self.texts else "right")
        for row in self.rows:
            style = "bold" if OURS in row else ("red" if "MISS" in row[-1] else None)
            table.add_row(*row, style=style)
        return table


def bytes_grid(settings: Iterable[Simulated]) -> Grid:
    """Return bytes and memory of every setting and system."""
    rows: list[tuple[str, ...]] = []
    for found in settings:
        for name, side in found.sides.items():
            told = side.to_json()
            rows.append(
                (
                    found.name,
                    name,
                    f"{found.moving:,}",
                    f"{told['above']:,}",
                    f"{told['mean']:.2f}",
                    f"{told['max']:.1f}",
                    iec(told["extra_bytes"]),
                    f"{told['mean_collectives']:.1f} / {told['max_collectives']}",
                )
            )
    return Grid(
        title="Bytes received and memory, over the pairs that have to move something",
        headings=(
            "mesh, tensor",
            "planner",
            "pairs",
            "above the least",
            "mean",
            "max",
            "extra memory",
            "collectives, mean / max",
        ),
        rows=tuple(rows),
        texts=2,
    )


def honesty_grid(settings: Iterable[Simulated]) -> Grid:
    """Return what is wrong with our plans, which should be nothing."""
    rows = tuple(
        (
            found.name,
            f"{found.pairs:,}",
            f"{found.below:,}",
            f"{found.needless:,}",
            f"{found.over_memory:,}",
            iec(found.buffer_bytes),
            "; ".join(sorted(set(found.whys.values()))) or "-",
        )
        for found in settings
    )
    return Grid(
        title="Ours, all pairs",
        headings=(
            "mesh, tensor",
            "pairs",
            "told less than the least",
            "sent for nothing",
            "over source + target + buffer",
            "largest buffer",
            "why above the least",
        ),
        rows=rows,
    )


def plans_grid(times: PlanTimes) -> Grid:
    """Return how long plans take."""
    told = times.to_json()

    def row(what: str, name: str, bar: float | None) -> tuple[str, ...]:
        middle, most = told[f"{name}_median"], told[f"{name}_max"]
        verdict = "" if bar is None else _verdict(middle <= bar)
        limit = "" if bar is None else f"{bar * 1e6:.0f} us"
        return what, f"{middle * 1e6:.1f} us", f"{most * 1e6:.1f} us", limit, verdict

    return Grid(
        title=f"One plan on (2, 2, 2), {len(times.cold):,} pairs",
        headings=("plan", "median", "max", "bar", ""),
        rows=(
            row("new shape", "cold", COLD_PLAN_SECONDS),
            row("the target's spec, before it", "spec", None),
            row("both, torch", "torch_cold", None),
            row("look-up", "cached", CACHED_PLAN_SECONDS),
            row("look-up, torch", "torch_cached", None),
        ),
    )


def links_grid(links: Sequence[Link]) -> Grid:
    """Return what collectives take by themselves."""
    sizes = sorted({link.num_bytes for link in links})
    by_key = {(link.ranks, link.name, link.num_bytes): link for link in links}
    rows: list[tuple[str, ...]] = []
    for ranks, name in dict.fromkeys((link.ranks, link.name) for link in links):
        found = [by_key[ranks, name, size] for size in sizes]
        rate = found[-1].received_bytes / found[-1].seconds / 1e9
        cells = [f"{link.seconds * 1e6:,.0f} us" for link in found]
        rows.append((f"{name}, {ranks} ranks", *cells, f"{rate:.2f} GB/s"))
    return Grid(
        title="Collectives of Gloo, by the bytes that each rank puts in",
        headings=("collective", *map(iec, sizes), "received at the largest"),
        rows=tuple(rows),
    )


def summary_grid(timed: Sequence[Timed]) -> Grid:
    """Return medians and extremes of the wall time by size."""
    rows: list[tuple[str, ...]] = []
    for size in SIZES:
        found = [one for one in timed if one.size == size.name]
        what = f"{size.name}, {iec(size.num_bytes)}"
        for kind, chosen, bar in (
            ("all", found, BAR),
            ("Shard to Shard", [one for one in found if one.is_shard_to_shard], SHARD_TO_SHARD_BAR),
        ):
            if chosen:
                ratios = [one.ratio for one in chosen]
                over = sum(ratio > bar for ratio in ratios)
                worst = max(chosen, key=lambda one: one.ratio)
                rows.append(
                    (
                        what,
                        kind,
                        f"{len(chosen)}",
                        f"{median(ratios):.2f}",
                        f"{worst.ratio:.2f}",
                        f"{worst.mesh} {worst.change}",
                        f"{bar:.1f}",
                        f"{over} MISS" if over else "pass",
                    )
                )
    return Grid(
        title="Our wall time over torch's, 4 ranks on Gloo",
        headings=("tensor", "transitions", "", "median", "worst", "which", "bar", "above it"),
        rows=tuple(rows),
        texts=2,
    )


def wall_grid(timed: Sequence[Timed]) -> Grid:
    """Return the times of every transition: torch's, ours, and the ratio."""
    sizes = [size.name for size in SIZES if any(one.size == size.name for one in timed)]
    keyed = sorted(timed, key=lambda one: (len(one.mesh), one.change))
    rows: list[tuple[str, ...]] = []
    for (mesh, change), group in itertools.groupby(keyed, key=lambda one: (one.mesh, one.change)):
        by_size = {one.size: one for one in group}
        cells: list[str] = []
        for size in sizes:
            one = by_size.get(size)
            cells += ["", "", ""] if one is None else _times(one)
        rows.append((f"{mesh} {change}", *cells))
    return Grid(
        title="Every transition",
        headings=(
            "transition",
            *(text for size in sizes for text in (f"{size}: torch", "ours", "ratio")),
        ),
        rows=tuple(rows),
    )


def _times(one: Timed) -> list[str]:
    mark = " MISS" if one.ratio > one.bar else ""
    times = [f"{one.seconds(system) * 1e3:.2f} ms" for system in (PEER, OURS)]
    return [*times, f"{one.ratio:.2f}{mark}"]


def miscounted(timed: Iterable[Timed]) -> list[str]:
    """Return the transitions in which other bytes came than ``explain`` says."""
    return [
        f"{one.mesh} {one.change}, {one.size}: {one.received_bytes:,} bytes came, "
        f"{one.told_bytes:,} were told"
        for one in timed
        if one.received_bytes != one.told_bytes
    ]


def _verdict(holds: bool) -> str:
    return "pass" if holds else "MISS"
