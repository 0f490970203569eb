"""Ranks save models that transformers has spread over them, and load what other ranks saved.

Run by test_transformers, one process per rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import dtckpt.checkpoint as dcp

from ..processes import join_group, leave_group
from .tiny_models import CONFIGS, pretrained, write_pretrained


def before_fork() -> None:
    """Let transformers import what it needs for these models: two seconds of each rank."""
    import_module("transformers.distributed")
    with tempfile.TemporaryDirectory() as folder:
        write_pretrained(Path(folder))
        for name in CONFIGS:
            pretrained(Path(folder), name)


def main(folder: Path, runs: list[tuple[dict[str, int], str | None, list[str]]]) -> None:
    """Spread every model over axes of these sizes, save it, and load what others saved."""
    for number, (spread, target, sources) in enumerate(runs):
        size = math.prod(spread.values())
        if int(os.environ["RANK"]) >= size:
            continue
        join_group(size, str(number))
        for name in CONFIGS:
            model = pretrained(folder, name, **spread)
            if target is not None:
                check_saved(model, folder / target / name)
            check_loaded(model, [folder / source / name for source in sources])
        dist.barrier()
        dist.destroy_process_group()
    join_group()
    leave_group()


def check_saved(model: Any, place: Path) -> None:
    """Save a model, for which no tensor may be sent."""
    kinds = {repr(p) for v in model.state_dict().values() for p in getattr(v, "placements", ())}
    assert any("split" in k or "sf=" in k for k in kinds), f"nothing is packed: {kinds}"
    with CommDebugMode() as sent:
        dcp.save({"model": model}, place)
    assert sent.get_total_counts() == 0, sent.get_comm_counts()


def check_loaded(model: Any, places: list[Path]) -> None:
    """Load a model that has its values already, and find them again."""
    wanted = {key: _local(value).clone() for key, value in model.state_dict().items()}
    for place in places:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        dcp.load({"model": model}, place)
        for key, value in model.state_dict().items():
            assert _local(value).equal(wanted[key]), f"{key} of {place}"


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
