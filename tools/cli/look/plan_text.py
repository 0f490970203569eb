"""What a load would cost each rank, for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....checkpoint.ranks.text import ranks_text
from ..common.console import count, iec, mesh_text, printable, stdout_console
from ..common.grid import Grid, Lines, plain, show

if TYPE_CHECKING:
    from ....checkpoint import LoadCosts, RankCost

_MAX_LINES = 16


def show_costs(costs: LoadCosts) -> None:
    """Print a line for each set of ranks that cost the same."""
    console = stdout_console()
    mesh, slowest = costs.mesh, costs.slowest
    times = costs.read_bytes / costs.stored_bytes if costs.stored_bytes else 0.0
    head = Grid()
    head.add(plain("checkpoint", "bold"), plain(printable(costs.url)))
    head.add(plain("mesh", "bold"), plain(f"{mesh_text(mesh)}: {count(mesh.size, 'rank')}"))
    head.add(
        plain("in all", "bold"),
        plain(
            f"{iec(costs.stored_bytes)} stored, {iec(costs.read_bytes)} read ({times:.1f} times)"
        ),
    )
    head.add(
        plain("slowest", "bold"),
        plain(f"{ranks_text(slowest.ranks)}: {iec(slowest.read_bytes)} read"),
    )
    lines = _alike(costs)
    rest = lines[_MAX_LINES:]
    grid = Grid(
        "ranks",
        "state",
        "read",
        "files",
        "requests",
        "shared",
        "received",
        right=(1, 2, 3, 4, 5, 6),
    )
    for alike in lines[:_MAX_LINES]:
        cost = alike[0]
        grid.add(
            plain(ranks_text(sorted(rank for one in alike for rank in one.ranks))),
            plain(iec(cost.state_bytes), "cyan"),
            plain(iec(cost.read_bytes), "cyan"),
            plain(f"{cost.num_files:,}"),
            plain(f"{cost.num_requests:,}"),
            plain(iec(max(one.shared_read_bytes for one in alike)), "cyan"),
            plain(iec(max(one.received_bytes for one in alike)), "cyan"),
        )
    show(console, head, Lines([plain("")]), grid)
    if rest:
        num = sum(len(one.ranks) for alike in rest for one in alike)
        show(console, Lines([plain(f"and {count(num, 'rank')} that read less; --json has all")]))


def _alike(costs: LoadCosts) -> list[list[RankCost]]:
    """Return the costs in groups of those that are the same for ranks that read alone."""
    groups: dict[tuple[int, ...], list[RankCost]] = {}
    for cost in costs.ranks:
        key = cost.read_bytes, cost.state_bytes, cost.num_files, cost.num_requests
        groups.setdefault(key, []).append(cost)
    return list(groups.values())
