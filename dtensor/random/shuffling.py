"""Random orders: elements sorted by random words."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_RADIX_BELOW = 1 << 15
"""Sizes from which torch sorts in linear time on the CPU; numpy does so below, for 16 bits."""

_HALF = 1 << 16


def order_of(words: Tensor) -> Tensor:
    """Return the indices that put different int64 words in order.

    Their upper halves are sorted, which is twice as fast, and then the few that are equal there.
    """
    upper = (words >> 32).int()
    if words.device.type == "cpu" and words.numel() < _RADIX_BELOW:
        order = _order_of_few(upper)
        ordered = upper[order]
    else:
        ordered, order = upper.sort()
    return _with_ties_in_order(order, ordered, words)


def _order_of_few(keys: Tensor) -> Tensor:
    lower = ((keys & (_HALF - 1)) - (_HALF >> 1)).short().numpy()
    upper = (keys >> 16).short().numpy()
    order = np.argsort(lower, kind="stable")
    return torch.from_numpy(order[np.argsort(upper[order], kind="stable")])


def _with_ties_in_order(order: Tensor, ordered: Tensor, words: Tensor) -> Tensor:
    """Swap neighbours whose keys are equal and whose words are not in order, till all are."""
    ties = (ordered[1:] == ordered[:-1]).nonzero().squeeze(1)
    while ties.numel():
        left, right = order[ties], order[ties + 1]
        is_wrong = words[left] > words[right]
        if not is_wrong.any():
            break
        # Of neighbours that overlap, those at odd places wait for the next time.
        wrong = ties[is_wrong]
        follows = torch.zeros_like(wrong, dtype=torch.bool)
        follows[1:] = wrong[1:] == wrong[:-1] + 1
        swapped = wrong[~follows]
        order[swapped], order[swapped + 1] = order[swapped + 1], order[swapped]
    return order
