"""Telling torch to use its operators on lists for a tensor class."""

from __future__ import annotations

from typing import Any

import torch


def use_lists(cls: type[torch.Tensor]) -> None:
    """Make clipping and, on accelerators, optimizers take lists of ``cls`` at once by default.

    With ``foreach=True`` they do in any case.
    """
    # Private: the list has no public name. On it, the norms of all gradients are one reduction and
    # a step some dozen operators instead of some dozen for each parameter.
    module: Any = getattr(torch.utils, "_foreach_utils", None)
    supported: list[type] = getattr(module, "_foreach_supported_types", [])
    if cls not in supported:
        supported.append(cls)
