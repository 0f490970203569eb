"""One rank of a launch; started by ``launch``."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .frame.team import Team

# DTensors need it when the first one is made; like this, all ranks have it from the fork server.
importlib.import_module("torch._dynamo")

JOB_FILE, RESULT_FILE, TEAM_FOLDER = "job.json", "result.json", "team"


def work(task: Callable[[Team, Any], Any], folder: Path, rank: int, size: int) -> None:
    """Take part in a task as one of its ranks and end this process."""
    gc.freeze()  # what is there before the task need not be walked again and again
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:  # nothing leaves the machine
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    job = json.loads((folder / JOB_FILE).read_text())
    team = Team(rank, size, folder / "rendezvous", folder / TEAM_FOLDER)
    code = 1
    try:
        result = task(team, job)
        if rank == 0:
            (folder / RESULT_FILE).write_text(json.dumps(result))
        team.barrier()
        code = 0
    except Exception:
        traceback.print_exc()
    team.leave(code)
