"""The process that holds objects for a job on a host. ``start_agent`` starts it; it needs no torch.

It leaves the session of whoever started it, and so outlives a trainer that is killed with all of
its process group. It ends when asked to, or when for a while nobody has been connected; then, or
if it is killed itself, the system takes back all that it held.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtckpt.addresses import AGENT_PORT_VARIABLE, listen

from ..frames import Channel
from ..greeting import PROTOCOL, Greeted, be_greeted
from ..registry import BEAT_SECONDS, Entry, Registry
from .holdings import Holdings
from .memory import total_bytes
from .serving import Session

_GREETING_SECONDS = 5.0
_STALLED_SECONDS = 60.0
"""How long a client may take nothing of what it has asked for."""
_MAX_STRANGERS = 128
"""So many may be about to make themselves known; others are turned away."""
_NUM_CLIENTS = 4096
"""For so many connections the limit of open files is raised, if it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What an agent is started with."""

    job: str
    host: str
    token: str
    """In hexadecimal digits."""
    stem: str
    """Path of its socket, lock and log, without the ending."""
    registry: str
    address: str
    """What to listen at besides; ``""`` finds out, and ``-`` is this host alone."""
    budget_bytes: int
    """Of all objects; 0 means half of the host's memory."""
    idle_seconds: float


class Agent:
    """Listens, greets, counts who is there, and ends."""

    def __init__(self, config: Config) -> None:
        self.config = config
        budget = config.budget_bytes or total_bytes() // 2
        self.holdings = Holdings(f"agent {config.host}", budget)
        self.sockets: list[socket.socket] = []
        self.entry = Entry(config.host, ())
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._num_clients = 0
        self._num_strangers = 0
        self._idle_since = time.monotonic()

    def open(self) -> None:
        """Listen on this host, and where others reach it; OSError where that cannot be done."""
        path = f"{self.config.stem}.sock"
        with suppress(FileNotFoundError):  # of an agent that was killed: this one has the lock
            os.unlink(path)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.bind(path)
        own.listen(_MAX_STRANGERS)
        hosts, outer = _listen(self.config.address)
        self.sockets = [own, *outer]
        addresses = tuple((h, s.getsockname()[1]) for h, s in zip(hosts, outer, strict=True))
        self.entry = Entry(self.config.host, addresses)
        if self.config.registry:
            Registry(self.config.registry, self.config.job).enter(self.entry)

    def run(self) -> None:
        """Serve until the end."""
        for listener in self.sockets:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        beat = time.monotonic()
        while not self._ended.wait(min(self.config.idle_seconds / 4, 5.0)):
            with self._lock:
                idle = time.monotonic() - self._idle_since if not self._num_clients else 0.0
            if idle > self.config.idle_seconds:
                break
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                self._tell_alive()

    def close(self) -> None:
        """Take back every trace of this agent."""
        if self.config.registry:
            with suppress(Exception):
                Registry(self.config.registry, self.config.job).leave(self.entry)
        with suppress(OSError):
            os.unlink(f"{self.config.stem}.sock")

    def _tell_alive(self) -> None:
        """Keep what says where this agent is from being taken for old."""
        with suppress(Exception):
            for ending in ("sock", "lock", "log"):
                os.utime(f"{self.config.stem}.{ending}")
            if self.config.registry:
                Registry(self.config.registry, self.config.job).enter(self.entry)

    def stop(self) -> None:
        """End ``run``."""
        self._ended.set()

    def status(self) -> dict[str, Any]:
        """Return what this agent tells of itself."""
        with self._lock:
            num_clients = self._num_clients
        return {
            "job": self.config.job,
            "host": self.config.host,
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "addresses": self.entry.addresses,
            "num_clients": num_clients,
            "num_objects": len(self.holdings.list("")),
            "used_bytes": self.holdings.used_bytes,
            "budget_bytes": self.holdings.budget_bytes,
        }

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:  # too many open files, say
                time.sleep(0.1)
                continue
            with self._lock:
                is_one_too_many = self._num_strangers >= _MAX_STRANGERS
                self._num_strangers += not is_one_too_many
            if is_one_too_many:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, _GREETING_SECONDS)
        try:
            try:
                own = Greeted(self.config.host, os.getpid())
                be_greeted(channel, self.config.job, bytes.fromhex(self.config.token), own)
            finally:
                with self._lock:
                    self._num_strangers -= 1
            with self._lock:
                self._num_clients += 1
            channel.seconds = _STALLED_SECONDS
            try:
                Session(channel, self.holdings, self.status, self.stop).run()
            finally:
                with self._lock:
                    self._num_clients -= 1
                    self._idle_since = time.monotonic()
        except OSError as error:
            if str(error) != "":
                print(f"a connection ended: {error}", file=sys.stderr, flush=True)
        finally:
            channel.close()


def _listen(address: str) -> tuple[list[str], list[socket.socket]]:
    if address == "-":
        return [], []
    if not address:
        return listen(_NUM_CLIENTS, AGENT_PORT_VARIABLE)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return [address], [socket.create_server((address, 0), family=family, backlog=_MAX_STRANGERS)]


def _locked(path: str) -> bool:
    """Take the lock of this job and host for the life of this process; whether it was free."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return True  # the descriptor stays open
        os.close(fd)  # another agent has ended just now and taken its file with it


def _collect_dead(folder: str) -> None:
    """Take away sockets, logs and locks of agents that were killed: nobody holds their locks."""
    for path in Path(folder).glob("*.lock"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for ending in (".sock", ".log", ".lock"):
                path.with_suffix(ending).unlink(missing_ok=True)


def _give_way() -> None:
    """Have as many files as it may, and be the first to go where the host runs out of memory.

    What an agent holds is a copy of what trainers have, and goes with it; no process but this one
    could give it back.
    """
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _leave_parents() -> None:
    """Go on in a child that nobody waits for, in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT):  # of a terminal that is none of its business
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Read the config from standard input, answer there that the agent is ready, and be it."""
    config = Config(**json.load(sys.stdin))
    _leave_parents()
    answer = os.dup(1)
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flags), fd)
    if not _locked(f"{config.stem}.lock"):
        os.write(answer, json.dumps({"busy": True}).encode())
        return
    os.dup2(os.open(f"{config.stem}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), 2)
    _give_way()
    _collect_dead(os.path.dirname(config.stem))
    agent = Agent(config)

    def end(_number: int, _frame: object) -> None:
        agent.stop()

    signal.signal(signal.SIGTERM, end)
    try:
        try:
            agent.open()
        except Exception as error:
            os.write(answer, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            return
        os.write(answer, b"{}")
        os.close(answer)
        agent.run()
    finally:
        agent.close()
        with suppress(OSError):
            os.unlink(f"{config.stem}.log")
            os.unlink(f"{config.stem}.lock")
        # Threads that serve would keep the interpreter from ending.
        os._exit(0)


if __name__ == "__main__":
    main()
