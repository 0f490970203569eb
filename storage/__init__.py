"""Where bytes live: one small ``Store`` protocol over disks, object stores and agents.

``open_store`` is the way in. Names are imported when they are first used, so that local stores do
not load the drivers of remote ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageTimeout,
)
from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from .base import Level, ObjectInfo, ReadRequest, Store, WriteStream
    from .local.store import LocalStore
    from .memory import MemoryStore
    from .open import open_store
    from .peers.starting import AgentStatus, agent_status, start_agent, stop_agent
    from .peers.store import PeersStore
    from .probing import Capabilities, capabilities
    from .remote.fsspec.store import FsspecStore
    from .remote.obstore.store import ObstoreStore
    from .schemes import register_scheme, unregister_scheme
    from .testing.faults import (
        Call,
        Delay,
        Fault,
        FlipBit,
        Kill,
        RaiseError,
        Rule,
        ShortRead,
        TornWrite,
    )
    from .testing.faulty import FaultyStore

__all__ = [
    "AccessDenied",
    "AgentStatus",
    "Call",
    "Capabilities",
    "Delay",
    "Fault",
    "FaultyStore",
    "FlipBit",
    "FsspecStore",
    "Kill",
    "Level",
    "LocalStore",
    "MemoryStore",
    "ObjectExists",
    "ObjectInfo",
    "ObjectNotFound",
    "ObstoreStore",
    "PeersStore",
    "RaiseError",
    "ReadRequest",
    "Rule",
    "ShortRead",
    "StorageError",
    "StorageTimeout",
    "Store",
    "TornWrite",
    "WriteStream",
    "agent_status",
    "capabilities",
    "open_store",
    "register_scheme",
    "start_agent",
    "stop_agent",
    "unregister_scheme",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            ".base": "Level ObjectInfo ReadRequest Store WriteStream",
            ".local.store": "LocalStore",
            ".memory": "MemoryStore",
            ".open": "open_store",
            ".peers.starting": "AgentStatus agent_status start_agent stop_agent",
            ".peers.store": "PeersStore",
            ".probing": "Capabilities capabilities",
            ".remote.fsspec.store": "FsspecStore",
            ".remote.obstore.store": "ObstoreStore",
            ".schemes": "register_scheme unregister_scheme",
            ".testing.faults": "Call Delay Fault FlipBit Kill RaiseError Rule ShortRead TornWrite",
            ".testing.faulty": "FaultyStore",
        },
    )


def __dir__() -> list[str]:
    return __all__
