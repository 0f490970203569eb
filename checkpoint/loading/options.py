"""What the caller of a load wants of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..mapping.table import MappingTable
from ..state.renaming import Rename
from .casting import DTypePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Arguments of ``load``, as they were given."""

    strict: bool
    select: str | Sequence[str] | None
    rename: Rename | None
    mapping: MappingTable | None
    dtype_policy: DTypePolicy
    device: torch.device | str | None
    read_once: bool | None
    allow_pickle: bool
    storage: Mapping[str, Any]
