"""Lightning saves and loads by dtckpt: see docs/integrations/lightning.md.

``Trainer(plugins=[DtckptIO()])`` where every rank holds the whole model (one device, DDP), and
``Trainer(strategy=DtckptModelParallelStrategy(...))`` or ``DtckptFSDPStrategy`` where ranks hold
parts of it; ``newest(folder)`` finds what to go on from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from ..newest import newest
    from .checkpoint_io import DtckptIO
    from .fabric import DtckptFabricModelParallelStrategy
    from .strategies import DtckptFSDPStrategy, DtckptModelParallelStrategy

__all__ = [
    "DtckptFSDPStrategy",
    "DtckptFabricModelParallelStrategy",
    "DtckptIO",
    "DtckptModelParallelStrategy",
    "newest",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            "..newest": "newest",
            ".checkpoint_io": "DtckptIO",
            ".fabric": "DtckptFabricModelParallelStrategy",
            ".strategies": "DtckptFSDPStrategy DtckptModelParallelStrategy",
        },
    )


def __dir__() -> list[str]:
    return __all__
