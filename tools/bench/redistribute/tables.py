"""The results of the benchmark of redistribute as tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import median

from dtckpt.tools.cli.common.console import iec

from ..frame.table import MISS, Grid, show, verdict
from ..frame.timing import OURS, PEER
from .links import Link
from .plan_times import PlanTimes
from .planned import Simulated
from .wall import BAR, SHARD_TO_SHARD_BAR, SIZES, Timed

COLD_PLAN_SECONDS, CACHED_PLAN_SECONDS = 200e-6, 5e-6
"""What a plan may take on three axes, in the median: made, and looked up."""

_PLANS = (
    ("new shape", "cold", COLD_PLAN_SECONDS),
    ("the target's spec, before it", "spec", None),
    ("both, torch", "torch_cold", None),
    ("look-up", "cached", CACHED_PLAN_SECONDS),
    ("look-up, torch", "torch_cached", None),
)


def bytes_grid(settings: Iterable[Simulated]) -> Grid:
    """Return bytes and memory of every setting and system."""
    rows: list[tuple[str, ...]] = []
    for found in settings:
        for name, side in found.sides.items():
            told = side.to_json()
            counts = f"{found.moving:,}", f"{told['above']:,}"
            shares = f"{told['mean']:.2f}", f"{told['max']:.1f}"
            collectives = f"{told['mean_collectives']:.1f} / {told['max_collectives']}"
            rows.append((found.name, name, *counts, *shares, iec(told["extra_bytes"]), collectives))
    return Grid(
        title="Bytes received and memory, over the pairs that have to move something",
        headings=(
            *("mesh, tensor", "planner", "pairs", "above the least", "mean", "max"),
            *("extra memory", "collectives, mean / max"),
        ),
        rows=tuple(rows),
        texts=2,
    )


def honesty_grid(settings: Iterable[Simulated]) -> Grid:
    """Return what is wrong with our plans, which should be nothing."""
    counted = ("pairs", "below", "needless", "over_memory")
    return Grid(
        title="Ours, all pairs",
        headings=(
            *("mesh, tensor", "pairs", "told less than the least", "sent for nothing"),
            *("over source + target + buffer", "largest buffer", "why above the least"),
        ),
        rows=tuple(
            (
                found.name,
                *(f"{getattr(found, name):,}" for name in counted),
                iec(found.buffer_bytes),
                "; ".join(sorted(set(found.whys.values()))) or "-",
            )
            for found in settings
        ),
    )


def plans_grid(times: PlanTimes) -> Grid:
    """Return how long plans take."""
    rows: list[tuple[str, ...]] = []
    for what, name, bar in _PLANS:
        middle, most = median(times[name]), max(times[name])
        limit = ("", "") if bar is None else (f"{bar * 1e6:.0f} us", verdict(middle <= bar))
        rows.append((what, show(middle, "microseconds"), show(most, "microseconds"), *limit))
    return Grid(
        title=f"One plan on (2, 2, 2), {len(times['cold']):,} pairs",
        headings=("plan", "median", "max", "bar", ""),
        rows=tuple(rows),
    )


def links_grid(links: Sequence[Link]) -> Grid:
    """Return what collectives take by themselves."""
    sizes = sorted({link.num_bytes for link in links})
    by_key = {(link.ranks, link.name, link.num_bytes): link for link in links}
    rows: list[tuple[str, ...]] = []
    for ranks, name in dict.fromkeys((link.ranks, link.name) for link in links):
        found = [by_key[ranks, name, size] for size in sizes]
        rate = show(found[-1].received_bytes / found[-1].seconds, "rate")
        cells = [f"{link.seconds * 1e6:,.0f} us" for link in found]
        rows.append((f"{name}, {ranks} ranks", *cells, rate))
    return Grid(
        title="Collectives of Gloo, by the bytes that each rank puts in",
        headings=("collective", *map(iec, sizes), "received at the largest"),
        rows=tuple(rows),
    )


def summary_grid(timed: Sequence[Timed]) -> Grid:
    """Return medians and extremes of the wall time by size."""
    rows: list[tuple[str, ...]] = []
    for size in SIZES:
        found = [
            (one.ratio, one) for one in timed if one.size == size.name and one.ratio is not None
        ]
        cutting = [pair for pair in found if pair[1].is_shard_to_shard]
        for kind, chosen, bar in (
            ("all", found, BAR),
            ("Shard to Shard", cutting, SHARD_TO_SHARD_BAR),
        ):
            if chosen:
                over = sum(ratio > bar for ratio, _ in chosen)
                most, worst = max(chosen, key=lambda pair: pair[0])
                middle = median(ratio for ratio, _ in chosen)
                rows.append(
                    (
                        f"{size.name}, {iec(size.num_bytes)}",
                        kind,
                        str(len(chosen)),
                        show(middle, "ratio"),
                        show(most, "ratio"),
                        f"{worst.mesh} {worst.name}",
                        f"{bar:.1f}",
                        f"{over} {MISS}" if over else verdict(True),
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
    keyed = sorted(timed, key=lambda one: (len(one.mesh), one.name))
    rows: list[tuple[str, ...]] = []
    for (mesh, change), group in itertools.groupby(keyed, key=lambda one: (one.mesh, one.name)):
        by_size = {one.size: one for one in group}
        cells = (_cells(by_size.get(size)) for size in sizes)
        rows.append((f"{mesh} {change}", *itertools.chain.from_iterable(cells)))
    headings = (text for size in sizes for text in (f"{size}: torch", "ours", "ratio"))
    return Grid(title="Every transition", headings=("transition", *headings), rows=tuple(rows))


def _cells(one: Timed | None) -> tuple[str, str, str]:
    if one is None or one.ratio is None:
        return "", "", ""
    theirs, ours = (f"{median(one.times[system]) * 1e3:.2f} ms" for system in (PEER, OURS))
    return theirs, ours, f"{one.ratio:.2f}{'' if one.is_met else f' {MISS}'}"


def miscounted(timed: Iterable[Timed]) -> list[str]:
    """Return the transitions in which other bytes came than ``explain`` says."""
    return [
        f"{one.mesh} {one.name}, {one.size}: {one.received_bytes:,} bytes came, "
        f"{one.told_bytes:,} were told"
        for one in timed
        if one.received_bytes != one.told_bytes
    ]
