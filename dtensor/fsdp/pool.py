"""Memory that a process group allocates, which its backend can send without a copy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..comm.devices import module_of
from ..torch_private import allocator_of


def memory_of_group(
    group: Any, device: torch.device
) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what makes a context in which tensors lie in such memory; None where there is none."""
    module: Any = module_of(device)
    allocator = allocator_of(group, device)
    if module is None or allocator is None or not hasattr(module, "MemPool"):
        return None
    pool = module.MemPool(allocator)
    return lambda: module.use_mem_pool(pool, device=device)
