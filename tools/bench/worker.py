"""One rank of a launch: measures the rows it is told to; started by ``launch``."""

from __future__ import annotations

import gc
import importlib
import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .row import Outcome, Row
from .rows import ROWS
from .setting import Setting
from .team import Team

# DTensors need it when the first one is made; like this, all ranks have it from the fork server.
importlib.import_module("torch._dynamo")


def work(job_file: Path, rank: int) -> None:
    """Take part in a job as one of its ranks and end this process."""
    gc.freeze()  # what is there before the first row need not be walked again and again
    job: dict[str, Any] = json.loads(job_file.read_text())
    setting = Setting(**job["setting"])
    folder = job_file.parent
    team = Team(rank, job["ranks"], folder / "rendezvous", folder / "checkpoints")
    code = 1
    try:
        chosen = [row for row in ROWS if row.name in job["rows"]]
        outcomes = {row.name: asdict(_measure(team, row, setting)) for row in chosen}
        if rank == 0:
            (folder / "outcomes.json").write_text(json.dumps(outcomes))
        team.barrier()
        code = 0
    except Exception:
        traceback.print_exc()
    team.leave(code)


def _measure(team: Team, row: Row, setting: Setting) -> Outcome:
    team.say(f"{row.name}: {row.title}")
    return row.run(team, setting)
