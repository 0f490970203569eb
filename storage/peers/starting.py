"""Starting the agent of a host, asking what it does, and ending it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from dtckpt.errors import StorageError

from .agent.process import Config
from .client import Lost, Peer
from .job import Job, job_of

IDLE_SECONDS = 1800.0
"""An agent ends when for so long no process of the job has been connected to it."""
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """What an agent tells of itself."""

    job: str
    host: str
    pid: int
    addresses: tuple[tuple[str, int], ...]
    """Where other hosts reach it; empty if they do not."""
    num_clients: int
    """Connections to it, this one among them."""
    num_objects: int
    used_bytes: int
    """Of objects, and of those that are being written."""
    budget_bytes: int
    """Of objects at most."""


def start_agent(
    job: str,
    *,
    budget_bytes: int | None = None,
    idle_seconds: float = IDLE_SECONDS,
    address: str | None = None,
    **options: Any,
) -> AgentStatus:
    """Find the agent of a job on this host, or start it, and return what it tells of itself.

    It is a process in a session of its own, which outlives this one, and holds what is saved to
    ``peers://job``: ``budget_bytes`` of objects at most, by default (or for 0) half of the host's
    memory. It ends when for ``idle_seconds`` nobody of the job has been connected to it, or by
    ``stop_agent``. A save starts it, too; whoever needs another budget does so before.

    Other hosts reach it at ``address``; by default, where they know of each other (``agents=`` or
    ``registry=``), at the address that ``DTCKPT_HOST`` names or the one on the way to
    ``MASTER_ADDR``, else not at all. ``DTCKPT_AGENT_PORT`` fixes port or ports. ``options`` are
    those of the store: ``host``, ``agents``, ``registry``, ``token``, ``timeout``.

    StorageError if it cannot be started, or is one of another version.
    """
    asked = job_of(job, **options)
    status = ensure_agent(
        asked, budget_bytes=budget_bytes or 0, idle_seconds=idle_seconds, address=address
    )
    return _status(status)


def agent_status(job: str, **options: Any) -> AgentStatus | None:
    """Return what the agent of a job on this host tells of itself; None if there is none."""
    try:
        return _status(_own(job_of(job, **options)).ask("status")[0])
    except Lost:
        return None


def stop_agent(job: str, **options: Any) -> bool:
    """End the agent of a job on this host, with all that it holds; return whether there was one."""
    peer = _own(job_of(job, **options))
    status = agent_status(job, **options)
    if status is None:
        return False
    with suppress(Lost):
        peer.ask("stop")
    limit = time.monotonic() + _START_SECONDS
    while os.path.exists(f"{peer.job.stem}.lock"):
        if time.monotonic() > limit:
            raise StorageError(f"the agent of {peer.where}, process {status.pid}, does not end")
        time.sleep(0.01)
    return True


def ensure_agent(
    job: Job,
    *,
    budget_bytes: int = 0,
    idle_seconds: float = IDLE_SECONDS,
    address: str | None = None,
) -> dict[str, Any]:
    """Start the agent of a job unless it runs, and return its status."""
    if budget_bytes < 0 or idle_seconds <= 0:
        raise ValueError(
            f"bad limits of an agent: budget_bytes={budget_bytes}, idle_seconds={idle_seconds}"
        )
    if address is None:
        address = "" if job.spans_hosts else "-"
    config = Config(
        job=job.name,
        host=job.host,
        token=job.token.hex(),
        stem=job.stem,
        registry=job.registry,
        address=address,
        budget_bytes=budget_bytes,
        idle_seconds=idle_seconds,
    )
    limit = time.monotonic() + _START_SECONDS
    while True:
        with suppress(Lost):
            return _own(job).ask("status")[0]
        if not _launch(config) and time.monotonic() > limit:
            raise StorageError(
                f"an agent of the job {job.name!r} has the lock {job.stem}.lock on this host, but "
                "does not answer. Find out which process that is, and end it"
            )
        time.sleep(0.01)


def _own(job: Job) -> Peer:
    return Peer(job, (f"{job.stem}.sock",), job.host)


def _launch(config: Config) -> bool:
    """Start an agent; return whether it has come into being, and no other one has the lock."""
    command = [sys.executable, "-m", f"{__package__}.agent.process"]
    try:
        # The token goes through a pipe: command lines can be read by all users of a host.
        told = subprocess.run(
            command,
            input=json.dumps(asdict(config)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"cannot start an agent of the job {config.job!r}: {error}") from error
    try:
        answer = json.loads(told.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": told[-2000:] or "it ended without a word"}
    if "error" in answer:
        raise StorageError(f"cannot start an agent of {config.job!r}: {answer['error']}")
    return "busy" not in answer


def _status(told: dict[str, Any]) -> AgentStatus:
    fields = {name: told[name] for name in AgentStatus.__dataclass_fields__}
    fields["addresses"] = tuple((str(host), int(port)) for host, port in fields["addresses"])
    return AgentStatus(**fields)
