"""What numbers of a dtype can carry: sums, orders, terms."""

from __future__ import annotations

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which terms neither overflow nor round where one device would not."""
    return torch.float32 if is_low(dtype) else dtype


def is_low(dtype: torch.dtype) -> bool:
    """Whether a dtype is a float of half precision or less."""
    return dtype.is_floating_point and dtype.itemsize < 4


def carries(op: str, source: torch.dtype, result: torch.dtype) -> bool:
    """Whether a sum or product of terms in one dtype is that of the terms in another."""
    if source == result:
        return True
    drops_part = op == "product" and source.is_complex and not result.is_complex
    return is_inexact(source) and is_inexact(result) and not drops_part


def keeps_order(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether of two numbers in one dtype the larger is not the smaller in another."""
    if source.is_floating_point and result.is_floating_point:
        return True
    return not result.is_complex and torch.promote_types(source, result) == result


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype has fractions: a float or a complex number."""
    return dtype.is_floating_point or dtype.is_complex
