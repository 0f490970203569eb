"""What the caller of a load wants of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dtckpt.errors import LayoutMismatch

from ..mapping.table import MappingTable
from ..state.renaming import Rename
from ..timing.bars import OnProgress
from .casting import DTypePolicy, check_policy

Strict = bool | Literal["state"]
"""Whether state and checkpoint have the same leaves: both ways, or all of the state at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Arguments of ``load``, as they were given."""

    strict: Strict
    select: str | Sequence[str] | None
    rename: Rename | None
    mapping: MappingTable | None
    dtype_policy: DTypePolicy
    device: torch.device | str | None
    read_once: bool | None
    allow_pickle: bool
    storage: Mapping[str, Any]
    on_progress: OnProgress | None

    @property
    def wants_all(self) -> bool:
        """Whether some rank has to ask for every leaf of the checkpoint."""
        return bool(self.strict) and self.strict != "state"

    def check(self) -> None:
        """Raise LayoutMismatch for what is no such argument."""
        check_policy(self.dtype_policy)
        if self.strict not in (True, False, "state"):
            raise LayoutMismatch(f"strict={self.strict!r}: expected True, False or 'state'")
