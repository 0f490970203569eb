"""The training loop's side: when all ranks save, what asks for it, and what follows.

Names are imported when they are first used: asking for a save from another process loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from ..agreement.agreement import Agreement
    from ..agreement.gate import Agreed
    from .demand import request_save
    from .emergency import Emergency
    from .signals import Signals

__all__ = [
    "Agreed",
    "Agreement",
    "Emergency",
    "Signals",
    "request_save",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            "..agreement.agreement": "Agreement",
            ".demand": "request_save",
            ".emergency": "Emergency",
            "..agreement.gate": "Agreed",
            ".signals": "Signals",
        },
    )


def __dir__() -> list[str]:
    return __all__
