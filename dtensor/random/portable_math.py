"""Logarithms, sines and exponentials that have the same bits on every device.

A library function rounds as its processor and its vendor please. These are made of additions,
products, quotients, square roots and conversions, one operator each, which IEEE 754 defines to the
last bit, and of integer operators on the bits of numbers. A product and a sum are never one
operator (`addcmul`, `add` with an `alpha` that is no power of two), since some devices round those
once and others twice. The polynomials were fitted at their Chebyshev nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kept import Scratch, constant, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """How the numbers of a dtype are written, and polynomials that are good enough for them."""

    dtype: torch.dtype
    bits: torch.dtype
    """Integers of as many bits."""
    digits: int
    """Bits of the fraction."""
    bias: int
    root_half: int
    """The bits of the square root of 1/2."""
    sign: int
    """The lowest integer, which has the sign bit only."""
    largest_exponent: float
    """What ``exponential_`` is asked for at most; more overflows, and less is 0."""
    ln2: tuple[float, float]
    """The natural logarithm of 2 in two parts; some integers times the first one are exact."""
    logarithm: tuple[float, ...]
    """log(m) = s * P(s * s), s = (m - 1) / (m + 1), for m from sqrt(1/2) to sqrt(2)."""
    sine: tuple[float, ...]
    """sin(pi * v) = v * P(v * v), for v from -1/2 to 1/2."""
    exponential: tuple[float, ...]
    """exp(r) for r between minus and plus log(2) / 2."""


_FLOAT = _Format(
    dtype=torch.float32,
    bits=torch.int32,
    digits=23,
    bias=127,
    root_half=0x3F3504F3,
    sign=-(1 << 31),
    largest_exponent=110.0,
    ln2=(0.693115234375, 3.1946184945309415e-05),
    logarithm=(0.41295042087719824, 0.6665226379710065, 2.0000002358690883),
    sine=(
        0.07765591227601387,
        -0.5982904112834275,
        2.550077386528912,
        -5.167710076668315,
        3.1415926400772034,
    ),
    exponential=(
        0.0013941213100006334,
        0.008375210200870016,
        0.04166635163844457,
        0.1666641450716956,
        0.5000000047401394,
        1.0000000379432992,
        1.0,
    ),
)

_DOUBLE = _Format(
    dtype=torch.float64,
    bits=torch.int64,
    digits=52,
    bias=1023,
    root_half=0x3FE6A09E667F3BCD,
    sign=-(1 << 63),
    largest_exponent=750.0,
    ln2=(0.6931471805592082, 7.371002565167799e-13),
    logarithm=(
        0.14809867572313062,
        0.153125131147383,
        0.18183632241617026,
        0.22222197046404274,
        0.2857142876073828,
        0.3999999999930191,
        0.6666666666666765,
        2.0,
    ),
    sine=(
        7.697826768224191e-07,
        -2.1903497074626018e-05,
        0.0004662998161898394,
        -0.007370430505916944,
        0.0821458865731029,
        -0.5992645293189447,
        2.5501640398773007,
        -5.167712780049969,
        3.141592653589793,
    ),
    exponential=(
        2.511015364692893e-08,
        2.763279054211718e-07,
        2.7557240604663896e-06,
        2.4801485074105115e-05,
        0.00019841269890340666,
        0.0013888888952696516,
        0.00833333333331949,
        0.04166666666648666,
        0.1666666666666668,
        0.5000000000000019,
        1.0,
        1.0,
    ),
)

_FORMATS = {f.dtype: f for f in (_FLOAT, _DOUBLE)}


@kept(64)
def _numbers(values: tuple[float, ...], factor: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(constant(v * factor, dtype) for v in values)


def _polynomial(coefficients: Sequence[Tensor], at: Tensor, out: Tensor) -> Tensor:
    torch.mul(at, coefficients[0], out=out).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        out.mul_(at).add_(coefficient)
    return out


def logarithm_of_negative(x: Tensor, unit: int, factor: float, scratch: Scratch) -> Tensor:
    """Return ``factor * log(-x / 2**unit)`` for normal numbers below 0; ``x`` is overwritten.

    It is exactly 0 where ``-x`` is ``2**unit``, and never has the sign that it should not have. The
    slots 1 to 3 are written, and the last one is returned.
    """
    dtype = x.dtype
    form, lowest, mask, digits, root_half, one, ln2, coefficients = _of_logarithm(
        dtype, unit, factor
    )
    bits = x.view(form.bits).sub_(lowest)
    exponent = torch.bitwise_right_shift(bits, digits, out=scratch.slot(3, form.bits))
    power = scratch.slot(1, dtype).copy_(exponent)
    bits.bitwise_and_(mask).add_(root_half)
    above = torch.add(x, one, out=scratch.slot(2, dtype))
    ratio = x.sub_(one).div_(above)
    square = torch.mul(ratio, ratio, out=above)
    series = _polynomial(coefficients, square, scratch.slot(3, dtype))
    return series.mul_(ratio).add_(power.mul_(ln2))


@kept(64)
def _of_logarithm(dtype: torch.dtype, unit: int, factor: float) -> tuple[Any, ...]:
    """Return the constants of a logarithm: to look them up one by one would take its time."""
    form = _FORMATS[dtype]
    lowest = _wrapped(form.root_half + (unit << form.digits) + form.sign, form)
    integers = (lowest, (1 << form.digits) - 1, form.digits, form.root_half)
    return (
        form,
        *[constant(number, form.bits) for number in integers],
        constant(1.0, dtype),
        constant(_LN2 * factor, dtype),
        _numbers(form.logarithm, factor, dtype),
    )


_LN2 = 0.6931471805599453


def _wrapped(number: int, form: _Format) -> int:
    span = -2 * form.sign
    return (number - form.sign) % span + form.sign


def sine_of_turns(v: Tensor, scratch: Scratch, slot: int = 1) -> Tensor:
    """Return ``sin(pi * v)`` for numbers from -1/2 to 1/2, in a slot; slot 0 is written, too."""
    square = torch.mul(v, v, out=scratch.slot(0, v.dtype))
    return _polynomial(_of_sine(v.dtype), square, scratch.slot(slot, v.dtype)).mul_(v)


@kept(8)
def _of_sine(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return _numbers(_FORMATS[dtype].sine, 1.0, dtype)


def tangent_of_turns(v: Tensor, scratch: Scratch) -> Tensor:
    """Return ``tan(pi * v)`` for numbers between -1/2 and 1/2; ``v`` is overwritten.

    The slots 0 to 2 are written.
    """
    sine = sine_of_turns(v, scratch)
    rest = torch.sub(constant(0.5, v.dtype), v.abs_(), out=v)
    return sine.div_(sine_of_turns(rest, scratch, 2))


def exponential_(x: Tensor, scratch: Scratch) -> Tensor:
    """Return ``exp(x)``; ``x`` and the slots 0 to 3 are overwritten."""
    form, dtype = _FORMATS[x.dtype], x.dtype
    x.clamp_(-form.largest_exponent, form.largest_exponent)
    power = torch.mul(x, constant(1 / _LN2, dtype), out=scratch.slot(0, dtype)).round_()
    for part in form.ln2:
        x.sub_(torch.mul(power, constant(part, dtype), out=scratch.slot(1, dtype)))
    series = _polynomial(_numbers(form.exponential, 1.0, dtype), x, scratch.slot(2, dtype))
    exponent = scratch.slot(1, form.bits).copy_(power)
    one = constant(1, form.bits)
    half = torch.bitwise_right_shift(exponent, one, out=scratch.slot(3, form.bits))
    for part in (half, exponent.sub_(half)):  # the first of two factors stays within bounds
        series.mul_(_power_of_two(part, form, x))
    return series


def log(x: Tensor) -> Tensor:
    """Return the logarithm of normal numbers above 0."""
    return logarithm_of_negative(x.neg(), 0, 1.0, Scratch(x.shape, x.device))


def exp(x: Tensor) -> Tensor:
    """Return the exponential function of numbers."""
    return exponential_(x.clone(), Scratch(x.shape, x.device))


_SHIFT = 8
_STIRLING = (1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
_HALF_LOG_TWO_PI = 0.9189385332046728


def log_gamma(x: Tensor) -> Tensor:
    """Return the logarithm of the gamma function of float64 numbers of 1 and more.

    By Stirling's series at ``x + 8``, where its terms become small enough.
    """
    product = x.clone()
    for step in range(1, _SHIFT):
        product.mul_(x + step)
    y = x + _SHIFT
    inverse = torch.ones_like(y).div_(y)
    square = inverse * inverse
    series = _polynomial(_numbers(_STIRLING, 1.0, x.dtype), square, torch.empty_like(y))
    found = (y - 0.5).mul_(log(y)).sub_(y).add_(_HALF_LOG_TWO_PI)
    # Large products overflow where their logarithms are too small to count.
    shift = log(product.clamp_(max=1e300))
    return found.add_(series.mul_(inverse)).sub_(shift)


def _power_of_two(exponent: Tensor, form: _Format, out: Tensor) -> Tensor:
    biased = torch.add(exponent, constant(form.bias, form.bits), out=out.view(form.bits))
    biased.bitwise_left_shift_(constant(form.digits, form.bits))
    return out
