"""What is logged of redistributes, for ``DTCKPT_LOGS`` (``dtckpt.logs``)."""

from __future__ import annotations

from logging import DEBUG, INFO

import torch

from dtckpt.logs import logger_of

from ..comm.caches import remembered
from ..comm.costs import CostModel
from ..comm.traffic import call_site
from ..geometry.layout import Layout
from ..geometry.placement import format_placements
from ..mesh.spec import DTensorSpec
from .explain import explain

_redistributes = logger_of("redistribute")


def logs_redistributes() -> bool:
    """Whether every redistribute is to be noted."""
    return _redistributes.isEnabledFor(INFO)


def note_redistribute(source: DTensorSpec, target: DTensorSpec, plan: object) -> None:
    """Log a redistribute that is about to run on this rank, if ``logs_redistributes``."""
    mesh = source.mesh
    layouts, rank = (source.layout, target.layout), mesh.get_rank()
    received, sent = _bytes_of(*layouts, source.dtype, mesh.cost_model(), rank)
    there = "" if target.mesh == mesh else f" on {target.mesh.layout_mesh}"
    where = f" at {call_site()}" if _redistributes.isEnabledFor(DEBUG) else ""
    _redistributes.info(
        "%s %s (%s) on %s -> (%s)%s: %d bytes received, %d sent; %s%s",
        source.dtype,
        list(source.shape),
        format_placements(source.placements),
        mesh.layout_mesh,
        format_placements(target.placements),
        there,
        received,
        sent,
        plan,
        where,
    )


@remembered(1024)
def _bytes_of(
    source: Layout, target: Layout, dtype: torch.dtype, costs: CostModel, rank: int
) -> tuple[int, int]:
    told = explain(source, target, dtype, costs=costs, ranks=[rank])
    return told.received_bytes[rank], told.sent_bytes[rank]
