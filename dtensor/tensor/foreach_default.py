"""Telling torch to use its operators on lists for a tensor class."""

from __future__ import annotations

import torch

from ..torch_private import lists_by_default


def use_lists(cls: type[torch.Tensor]) -> None:
    """Make clipping and, on accelerators, optimizers take lists of ``cls`` at once by default.

    With ``foreach=True`` they do in any case.
    """
    # On it, the norms of all gradients are one reduction and a step some dozen operators instead of
    # some dozen for each parameter.
    supported = lists_by_default()
    if cls not in supported:
        supported.append(cls)
