"""Several hosts on one machine: agents with names of their own, which reach each other by TCP."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtckpt.storage import AgentStatus, PeersStore, agent_status, start_agent, stop_agent
from dtckpt.storage.peers.client import Peer
from dtckpt.storage.peers.job import job_of

from ...waiting import wait_for


@dataclass
class Hosts:
    """The agents of a job, by the names of their hosts."""

    registry: Path
    job: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")
    pids: dict[str, int] = field(default_factory=dict[str, int])

    def options(self, host: str) -> dict[str, Any]:
        """What a process of a host opens the job with."""
        return {"registry": str(self.registry), "host": host}

    def start(self, host: str, **more: Any) -> AgentStatus:
        more = {"budget_bytes": 64 << 20, "address": "127.0.0.1"} | more
        status = start_agent(self.job, **self.options(host), **more)
        self.pids[host] = status.pid
        return status

    def status(self, host: str) -> AgentStatus | None:
        return agent_status(self.job, **self.options(host))

    def kill(self, host: str) -> None:
        """End an agent as a host that dies does."""
        pid = self.pids.pop(host)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_running(pid))

    def store(self, host: str, **more: Any) -> PeersStore:
        return PeersStore(f"peers://{self.job}", **self.options(host), **more)

    def peer(self, host: str) -> Peer:
        """A way to an agent that does not lead through the store."""
        job = job_of(self.job, **self.options(host))
        return Peer(job, (f"{job.stem}.sock",), host)

    def close(self) -> None:
        for host in list(self.pids):
            stop_agent(self.job, **self.options(host))


@contextmanager
def hosts(registry: Path, *names: str, **more: Any) -> Generator[Hosts]:
    """Agents of several hosts, which end with the block."""
    made = Hosts(registry)
    try:
        for name in names:
            made.start(name, **more)
        yield made
    finally:
        made.close()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
