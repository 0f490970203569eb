"""At which addresses of its host a process listens: the coordinator of ranks, an agent.

Only at those that others are told of: by default the one on the way to where the ranks met
(``MASTER_ADDR``), so that nobody on another network can even connect.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

from dtckpt.errors import CheckpointError

HOST_VARIABLE = "DTCKPT_HOST"
"""Environment variable: the address or name at which other ranks reach this host."""
PORT_VARIABLE = "DTCKPT_PORT"
"""Environment variable: the port to listen at, or a range of them such as ``29600-29699``."""
AGENT_PORT_VARIABLE = "DTCKPT_AGENT_PORT"
"""Environment variable: the same for the agent of a host (``dtckpt.storage.peers``)."""

_BACKLOG = 4096
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that are nobody's; the way to them is the way to the rest of the world."""


def listen(
    num_ranks: int, port_variable: str = PORT_VARIABLE
) -> tuple[list[str], list[socket.socket]]:
    """Return listening sockets and the host name that others use for each.

    ``port_variable`` is the environment variable that may tell the port. Raises OSError where
    nothing can be listened at, CheckpointError for a wrong setting.
    """
    _allow_descriptors(num_ranks)
    ports = _ports(port_variable)
    if given := os.environ.get(HOST_VARIABLE):
        return [given], [_bound_as(given, ports)]
    hosts: list[str] = []
    sockets: list[socket.socket] = []
    for host in _own_hosts():
        try:
            sockets.append(_bound(host, ports))
            hosts.append(host)
        except OSError as error:  # a name may stand for an address that this host has no more
            if error.errno != errno.EADDRNOTAVAIL:
                for made in sockets:
                    made.close()
                raise
    return (hosts, sockets) if hosts else (["127.0.0.1"], [_bound("127.0.0.1", ports)])


def listen_beside(host: str) -> socket.socket:
    """Return a listening socket at an address of this host, for one who coordinates nothing.

    Where ports are given it takes the last that is free, and none if there is only one: those who
    coordinate cannot do without. Raises OSError where nothing can be listened at.
    """
    ports = _ports(PORT_VARIABLE)
    if len(ports) == 1 and ports[0]:
        raise OSError(errno.EADDRINUSE, f"{PORT_VARIABLE} leaves no port to spare")
    return _bound(host, ports[::-1])


def _ports(variable: str) -> range:
    """Return the ports to try."""
    text = os.environ.get(variable) or "0"
    first, _, last = text.partition("-")
    with suppress(ValueError):
        found = range(int(first), int(last or first) + 1)
        if found and found[0] >= 0 and found[-1] < 1 << 16:
            return found
    raise CheckpointError(
        f"{variable} is a port or a range of them, such as 29600 or 29600-29699; got {text!r}"
    )


def _bound_as(given: str, ports: range) -> socket.socket:
    """Listen where the user says that others reach this host."""
    infos = socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)
    try:
        return _bound(str(infos[0][4][0]), ports)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    # The address of a router in front of this host, which may pass it on to any of ours.
    return _bound("", ports)


def _bound(host: str, ports: range) -> socket.socket:
    busy: OSError | None = None
    for port in ports:
        try:
            if not host and socket.has_dualstack_ipv6():
                return socket.create_server(
                    (host, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            busy = error
    raise OSError(
        errno.EADDRINUSE,
        f"no port of {ports[0]}-{ports[-1]} is free at {host or 'this host'}; each process group "
        f"that saves or loads needs one ({PORT_VARIABLE}), each agent, too ({AGENT_PORT_VARIABLE})",
    ) from busy


def _own_hosts() -> list[str]:
    """Return the addresses of this host that other ranks can reach."""
    met = os.environ.get("MASTER_ADDR", "")
    found = [way for way in [_way_to(met)] if way] if met else []
    if met and found and (_is_local(met) or not _is_loopback(found[0])):
        return found
    # Where the ranks met is unknown, or its name stands for this host on this host alone.
    found += _addresses_of(socket.gethostname())
    found += [way for way in map(_way_to, _ANYWHERE) if way]
    outward = [host for host in dict.fromkeys(found) if not _is_loopback(host)]
    return outward or ["127.0.0.1"]


def _way_to(host: str) -> str:
    """Return this host's address on the way to another one; empty where there is no way."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(address)  # sends nothing
                return _usable(str(way.getsockname()[0]))
    return ""


def _addresses_of(name: str) -> Iterator[str]:
    with suppress(OSError):
        for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            if host := _usable(str(info[4][0])):
                yield host


def _usable(host: str) -> str:
    # Of an address that is valid on one link only, others would not know on which.
    address = ipaddress.ip_address(host.partition("%")[0])
    return "" if address.is_link_local or address.is_unspecified else host


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _is_local(name: str) -> bool:
    """Whether a name can stand for nothing but the host on which it is used."""
    if name == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


def _allow_descriptors(num_ranks: int) -> None:
    """Raise the soft limit of open files so far that there is a connection for every rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * num_ranks + 1024
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
