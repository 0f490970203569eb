"""Where bytes live: one small ``Store`` protocol over local disk and object stores.

``open_store`` is the way in. Names are imported when they are first used, so that local stores do
not load the drivers of remote ones.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import ObjectInfo, ReadRequest, Store, WriteStream
    from .faults import (
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
    from .faulty import FaultyStore
    from .fsspec_store import FsspecStore
    from .local import LocalStore
    from .memory import MemoryStore
    from .open import open_store

__all__ = [
    "Call",
    "Delay",
    "Fault",
    "FaultyStore",
    "FlipBit",
    "FsspecStore",
    "Kill",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "RaiseError",
    "ReadRequest",
    "Rule",
    "ShortRead",
    "Store",
    "TornWrite",
    "WriteStream",
    "open_store",
]

_MODULES = {
    "base": ("ObjectInfo", "ReadRequest", "Store", "WriteStream"),
    "faults": (
        "Call",
        "Delay",
        "Fault",
        "FlipBit",
        "Kill",
        "RaiseError",
        "Rule",
        "ShortRead",
        "TornWrite",
    ),
    "faulty": ("FaultyStore",),
    "fsspec_store": ("FsspecStore",),
    "local": ("LocalStore",),
    "memory": ("MemoryStore",),
    "open": ("open_store",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
