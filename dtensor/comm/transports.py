"""Transports: what is known of the backend that moves the bytes of a process group.

The one place that looks at backends. Who moves something asks the ``Peers`` it moves it between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from . import costs
from .costs import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How a backend moves bytes best."""

    costs: CostModel
    """What that takes, in which rounds, and from where on without buffers."""
    exchanges_terms: bool = False
    """Whether its own reduce-scatter is slower than an exchange of the terms."""
    agree_bytes: int
    """From here on ranks tell each other that they have the memory before anything moves, which
    takes no time beside the move."""


GLOO = Transport(costs=costs.GLOO, exchanges_terms=True, agree_bytes=64 << 20)
NCCL = Transport(costs=costs.NCCL, agree_bytes=1 << 30)
OTHER = Transport(costs=replace(costs.GLOO, direct_bytes=None), agree_bytes=64 << 20)
"""For backends of which nothing is known: collectives that all of them have, in small rounds."""


def least_agree_bytes() -> int:
    """Return the bytes below which no transport has ranks agree on memory."""
    return min(transport.agree_bytes for transport in (GLOO, NCCL, OTHER))


def transport_of(group: Any, device_type: str) -> Transport:
    """Return the transport of a process group, or of a raw backend, for tensors of a device."""
    return _transport(_backend_of(group, device_type), device_type)


def usual_transport(device_type: str) -> Transport:
    """Return the transport of the backend that torch would take: where there is no group."""
    return _transport(dist.get_default_backend_for_device(device_type), device_type)


def _transport(backend: str, device_type: str) -> Transport:
    known = {"gloo": GLOO, "fake": GLOO, "nccl": NCCL, "xccl": NCCL, "hccl": NCCL}
    found = known.get(backend, OTHER)
    if device_type == "cpu" or found.costs.direct_bytes is None:
        return found
    return replace(found, costs=replace(found.costs, direct_bytes=None))  # it stages on the host


def _backend_of(group: Any, device_type: str) -> str:
    """Return the name of the backend, empty where a group does not tell."""
    try:
        by_device = dist.get_backend_config(group)
    except (KeyError, RuntimeError, TypeError, ValueError):  # registered nowhere
        name = getattr(group, "name", None)
        return str(name()).lower() if callable(name) else ""
    pairs = (entry.partition(":") for entry in by_device.split(","))
    named = {device: backend for device, _, backend in pairs}
    return named.get(device_type, next(iter(named.values())) if len(named) == 1 else "")
