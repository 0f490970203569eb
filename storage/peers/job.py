"""Which agents belong together: the job, its secret, and where on this host its agent is."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtckpt.errors import StorageError

from ..failures import translated
from ..names import check_component

AGENTS = "DTCKPT_AGENTS"
"""Environment variable: ``host:port`` of the agents of all hosts, with commas between them."""
REGISTRY = "DTCKPT_AGENT_REGISTRY"
"""Environment variable: a directory that all hosts share, where agents leave word of themselves."""
TOKEN = "DTCKPT_AGENT_TOKEN"
"""Environment variable: the secret of the job."""
TOKEN_FILE = "DTCKPT_AGENT_TOKEN_FILE"
"""Environment variable: a file with it that nobody else can read (mode 0600)."""
HOST = "DTCKPT_AGENT_HOST"
"""Environment variable: what this host is called, if not by the name that the system has for it."""
FOLDER = "DTCKPT_AGENT_DIR"
"""Environment variable: a directory of this host for sockets and locks, if not one in ``/tmp``."""

_MIN_TOKEN_BYTES = 16
_STEM_LETTERS = 24
_MAX_FOLDER_BYTES = 107 - len("/.sock") - _STEM_LETTERS
"""The path of a socket has 107 bytes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that decides which agents a process talks to."""

    name: str
    host: str
    """Name of this host among those of the job."""
    agents: tuple[str, ...]
    """Addresses of agents that were given, ``host:port``."""
    registry: str
    """The directory that hosts share; empty if there is none."""
    token: bytes = field(repr=False)
    seconds: float
    """How long an agent may make no progress before it is given up."""

    @property
    def spans_hosts(self) -> bool:
        """Whether there is a way for agents of several hosts to know of each other."""
        return bool(self.agents or self.registry)

    @property
    def stem(self) -> str:
        """Path of socket, lock and log of this job's agent on this host, without the ending.

        The names of sockets are short: a hash stands for job and host.
        """
        known = hashlib.sha256(f"{self.name}\0{self.host}".encode()).hexdigest()
        return os.path.join(own_folder(), known[:_STEM_LETTERS])


def job_of(
    name: str,
    *,
    host: str | None = None,
    agents: Sequence[str] | None = None,
    registry: str | os.PathLike[str] | None = None,
    token: str | None = None,
    timeout: float = 30.0,
) -> Job:
    """Return the job called ``name``; what is not given is taken from the environment.

    ``ValueError`` for a bad name, address or time, ``StorageError`` for a token that others could
    read.
    """
    check_component(name)
    own = check_component(host or os.environ.get(HOST) or socket.gethostname())
    if agents is None:
        agents = [item for item in os.environ.get(AGENTS, "").split(",") if item.strip()]
    if isinstance(agents, str):
        raise TypeError(f"agents= is a list of addresses such as host:port, got {agents!r}")
    if timeout <= 0:
        raise ValueError(f"bad timeout {timeout}: expected seconds, more than 0")
    place = os.fspath(registry if registry is not None else os.environ.get(REGISTRY, ""))
    place = os.path.abspath(os.path.expanduser(place)) if place else ""
    return Job(
        name=name,
        host=own,
        agents=tuple(f"{host}:{port}" for host, port in map(address_of, agents)),
        registry=place,
        token=_token(name, token, place),
        seconds=timeout,
    )


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or ``[host]:port``.

    >>> address_of("[::1]:4000")
    ('::1', 4000)
    """
    host, _, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"bad address of an agent {text!r}: expected host:port")
    return host, int(port)


def own_folder() -> str:
    """Return the directory of this user for agents of this host, which nobody else may enter."""
    given = os.environ.get(FOLDER)
    path = given or os.path.join(tempfile.gettempdir(), f"dtckpt-agents-{os.getuid()}")
    if len(os.fsencode(path)) > _MAX_FOLDER_BYTES:
        raise StorageError(
            f"{path} is too long a name for the directory of agents' sockets: it may have "
            f"{_MAX_FOLDER_BYTES} bytes. Set {FOLDER} to a shorter one"
        )
    with translated("make", path):
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            f"{path} has to be a directory of this user that nobody else may enter (mode 0700), "
            f"since agents are reached through it. Remove it, or set {FOLDER} to another one"
        )
    return path


def _token(job: str, given: str | None, registry: str) -> bytes:
    if found := given or os.environ.get(TOKEN):
        return _checked(found.encode(), TOKEN)
    if path := os.environ.get(TOKEN_FILE):
        return _read_token(Path(path))
    # Made by the first who needs it: whoever may read the directory's secrets is of the job.
    path = Path(registry or own_folder()) / f"{job}.token"
    if not path.exists():
        _make_token(path)
    return _read_token(path)


def _read_token(path: Path) -> bytes:
    with translated("read the token of agents in", str(path)), path.open("rb") as file:
        status = os.fstat(file.fileno())
        token = file.read(1 << 16).strip()
    if status.st_mode & 0o077:
        raise StorageError(
            f"{path}: others can read this secret, with which they could read all that agents "
            "hold. Make another one, with mode 0600"
        )
    return _checked(token, str(path))


def _checked(token: bytes, where: str) -> bytes:
    if len(token) < _MIN_TOKEN_BYTES:
        raise StorageError(
            f"{where}: the token of agents has {len(token)} bytes, expected {_MIN_TOKEN_BYTES} or "
            "more that cannot be guessed"
        )
    return token


def _make_token(path: Path) -> None:
    """Leave a fresh token, unless somebody else is faster; nobody sees half of one."""
    with translated("leave the token of agents in", str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        fd = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secrets.token_hex(32))
            os.link(unfinished, path)
        except FileExistsError:
            pass
        finally:
            unfinished.unlink()
