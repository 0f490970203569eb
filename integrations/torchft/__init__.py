"""torchft replicas heal from each other by dtckpt: see docs/integrations/torchft.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from .transport import DtckptTransport

__all__ = ["DtckptTransport"]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(__name__, {".transport": "DtckptTransport"})


def __dir__() -> list[str]:
    return __all__
