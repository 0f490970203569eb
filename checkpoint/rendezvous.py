"""How the ranks of a process group find each other: one wire per group, made at its first use.

The group itself is used once, to tell everybody where the coordinator listens. From then on its
collectives belong to the training again.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import resource
import secrets
import socket
import struct
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from dtckpt.errors import CheckpointError, RankFailed

from ..dtensor.collectives import Peers, all_gather_even
from .text import ranks_text
from .wire import Wire

HOST_VARIABLE = "DTCKPT_HOST"
"""Environment variable that names the address at which other ranks reach this host."""

_HELLO = struct.Struct("!32sQ")  # token, rank
_CONNECT_SECONDS = 10.0
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a group and the connections between them."""

    rank: int
    all: tuple[int, ...]
    """Global numbers; the first one coordinates."""
    wire: Wire
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    """What saves and loads keep for the next one over the same group."""


_known: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def members_of(group: Any) -> Members:
    """Return the members of a group; its first call is a collective one.

    Raises the same CheckpointError on every rank if some rank cannot reach the coordinator.
    """
    with _lock:
        found = _known.get(group)
    if found is None:
        found = _connect(group)
        with _lock:
            _known[group] = found
    return found


def _connect(group: Any) -> Members:
    everyone = _global_ranks(group)
    rank = everyone[group.rank()]
    exchange = _GroupExchange(group, everyone, rank)
    listener: _Listener | None = None
    peers: dict[int, socket.socket] = {}
    problem = ""
    try:
        if rank == everyone[0]:
            try:
                listener = _Listener(len(everyone))
            except OSError as error:
                problem = f"it cannot listen: {error}"
        told = exchange(listener.invitation() if listener else b"{}")
        invitation: dict[str, Any] = json.loads(told[0])
        try:
            if listener is not None:
                listener.accept(everyone[1:], peers)
            elif invitation:
                peers[everyone[0]] = _call(invitation, rank)
        except OSError as error:
            problem = str(error)
        _raise_together(everyone, exchange(problem.encode(errors="backslashreplace")))
    except BaseException:
        for connection in peers.values():
            connection.close()
        raise
    finally:
        if listener is not None:
            listener.close()
    return Members(rank, everyone, Wire(peers, leads=rank == everyone[0]))


def _raise_together(everyone: tuple[int, ...], problems: list[bytes]) -> None:
    failed = {r: p.decode() for r, p in zip(everyone, problems, strict=True) if p}
    if failed:
        texts = "; ".join(f"rank {r}: {p}" for r, p in list(failed.items())[:5])
        raise CheckpointError(
            f"{ranks_text(list(failed))} could not be connected with rank {everyone[0]}, which "
            f"coordinates saves and loads: {texts}. Set {HOST_VARIABLE} on rank {everyone[0]} to "
            "an address at which the other hosts reach it"
        )


class _Listener:
    """Where the coordinator waits for the members."""

    def __init__(self, num_ranks: int) -> None:
        _allow_descriptors(num_ranks)
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
        else:
            self._socket = socket.create_server(("", 0), backlog=4096)
        self._token = secrets.token_hex(16).encode()

    def invitation(self) -> bytes:
        """Return what the members need to know."""
        value = {
            "hosts": _own_addresses(),
            "name": socket.gethostname(),
            "port": self._socket.getsockname()[1],
            "token": self._token.decode(),
        }
        return json.dumps(value).encode()

    def accept(self, ranks: tuple[int, ...], found: dict[int, socket.socket]) -> None:
        """Wait for all members and add their connections; OSError naming who did not come."""
        missing = set(ranks)
        self._socket.settimeout(_JOIN_SECONDS)
        while missing:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                raise TimeoutError(f"{ranks_text(sorted(missing))} did not connect") from None
            try:
                connection.settimeout(_CONNECT_SECONDS)
                token, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
                if not hmac.compare_digest(token, self._token) or rank not in missing:
                    raise ConnectionError("a stranger")
                connection.sendall(b"!")
            except OSError:
                connection.close()
                continue
            _prepare(connection)
            missing.discard(rank)
            found[rank] = connection

    def close(self) -> None:
        self._socket.close()


def _call(invitation: dict[str, Any], rank: int) -> socket.socket:
    """Connect to the coordinator at the first of its addresses that answers."""
    hosts: list[str] = invitation["hosts"]
    if invitation["name"] == socket.gethostname():
        hosts = ["127.0.0.1", *hosts]
    problems: list[str] = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, invitation["port"]), _CONNECT_SECONDS)
        except OSError as error:
            problems.append(f"{host}:{invitation['port']}: {error}")
            continue
        try:
            connection.sendall(_HELLO.pack(invitation["token"].encode(), rank))
            if _receive(connection, 1) == b"!":
                _prepare(connection)
                return connection
        except OSError as error:
            problems.append(f"{host}:{invitation['port']}: {error}")
        connection.close()
    raise ConnectionError("; ".join(problems) or "the coordinator told no address")


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed during the greeting")
        data += part
    return data


def _allow_descriptors(num_ranks: int) -> None:
    """Raise the soft limit of open files so far that there is a connection for every rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_ranks + 1024
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed < num_ranks + 64:
        raise OSError(
            errno.EMFILE,
            f"{num_ranks} ranks need as many connections, but this process may open {hard} files; "
            "raise the limit (ulimit -Hn)",
        )


def _own_addresses() -> list[str]:
    """Return addresses at which other hosts may reach this one, the likeliest first."""
    if given := os.environ.get(HOST_VARIABLE):
        return [given]
    found: list[str] = []
    master = os.environ.get("MASTER_ADDR")
    if master:  # the interface that leads to where the ranks met
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))
            found.append(way.getsockname()[0])
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys([*found, name]))


class _GroupExchange:
    """Gives everybody everyone's bytes over the collectives of a group."""

    def __init__(self, group: Any, ranks: tuple[int, ...], rank: int) -> None:
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._device = device_of(group)

    def __call__(self, payload: bytes) -> list[bytes]:
        """All-gather byte strings of any length: first the lengths, then the padded bytes."""
        try:
            lengths = self._all_gather(torch.tensor([len(payload)], dtype=torch.int64))
            longest = max(int(length) for length in lengths)
            mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
            if payload:
                mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            gathered = self._all_gather(mine)
        except RuntimeError as error:
            raise RankFailed(
                f"rank {self._rank} could not reach the other ranks ({ranks_text(self._ranks)} "
                f"take part): one of them died, fell silent or left. {_short(error)}"
            ) from error
        return [
            data[: int(length)].numpy().tobytes()
            for data, length in zip(gathered, lengths, strict=True)
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        count = len(self._ranks)
        peers = Peers(self._group, tuple(range(count)), self._ranks, self._device.type)
        return list(all_gather_even(mine.to(self._device), peers).to("cpu"))


def _short(error: BaseException) -> str:
    """Return the fact that a backend reports, without the advice that Gloo appends to it."""
    return str(error).partition(" This is typically")[0].partition("\n")[0]


def _global_ranks(group: Any) -> tuple[int, ...]:
    if isinstance(group, torch.distributed.ProcessGroup):
        return tuple(torch.distributed.get_process_group_ranks(group))
    return tuple(range(group.size()))


def device_of(group: Any) -> torch.device:
    """Return where a group moves bytes: the CPU if it can, else the current accelerator."""
    if isinstance(group, torch.distributed.ProcessGroup):
        backends = str(torch.distributed.get_backend_config(group))
        if "cpu:" not in backends and "gloo" not in backends:
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None:
                return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
