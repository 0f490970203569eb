"""``Stateful`` under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.stateful import Stateful, StatefulT

__all__ = ["Stateful", "StatefulT"]
