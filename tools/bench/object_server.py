"""An S3 server in a process of its own, for the rows about object stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .frame.team import Team

_ROOT = Path(__file__).parents[2]
_PROGRAM = "tests.servers.on_orders"
"""Which says what orders there are."""
_OWN = "fake-s3"
SERVER = os.environ.get("DTCKPT_BENCH_SERVER", _OWN)
"""Which server rows save to and load from: our own, in memory, or another one of the tests."""


class ObjectServer:
    """The server, as a rank sees it; only the first one gives it orders."""

    def __init__(self, found: str, process: subprocess.Popen[str] | None) -> None:
        told = json.loads(found)
        self._bucket: str = told["url"]
        self.options: dict[str, Any] = told["options"]
        """What leads s3fs and dtckpt here."""
        self._process = process

    @property
    def endpoint(self) -> str:
        return self.options["client_kwargs"]["endpoint_url"]

    def url(self, name: str) -> str:
        return f"{self._bucket}/{name}"

    def clear(self, name: str) -> None:
        """Take away all whose keys begin so."""
        self._order(f"clear {name}")

    def set_latency(self, seconds: float) -> None:
        """Have every request take as long."""
        self._order(f"latency {seconds}")

    def count(self) -> int:
        """Return how many requests there were since the last order."""
        return self._order("count")

    def _order(self, order: str) -> int:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return 0
        print(order, file=process.stdin, flush=True)
        return int(process.stdout.readline())


@contextmanager
def object_server(team: Team, name: str = _OWN) -> Generator[ObjectServer]:
    """Serve all ranks of a team during the block."""
    if team.rank:
        yield ObjectServer(team.gather("")[0], None)
        return
    command = [sys.executable, "-m", _PROGRAM, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield ObjectServer(team.gather(process.stdout.readline())[0], process)
