"""Distributions, made of random words that are given.

Every value has the same bits on every device: what is not exact is done by `portable_math` or by
one rounded operation per operator, and parameters are worked out in Python.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from .counter_rng import Sampler, Words, scaled
from .kept import constant, kept
from .portable_math import exponential_, logarithm_of_negative, sine_of_turns, tangent_of_turns

_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Digits of a random number in [0, 1), such that all of them are kept."""

_UNITS = {
    dtype: (
        constant(64 - bits),
        constant(0.5, torch.float64 if bits == 53 else torch.float32),
        2.0**-bits,
    )
    for dtype, bits in _BITS.items()
}
"""By dtype: how far a word is shifted to be a fraction in units of the last digit."""

_LOWEST = -(1 << 63)


def uniform(low: float = 0, high: float = 1) -> Sampler:
    """Return what samples [low, high)."""
    if (low, high) == (0, 1):
        return _fractions

    def sample(words: Words, out: Tensor) -> None:
        work = _work(words, out)
        _fractions(words, work)
        _moved(work, low, high - low, out)
        out.clamp_(max=_below(high, out.dtype) if high > low else high)

    return sample


def _fractions(words: Words, out: Tensor) -> None:
    """Write numbers in [0, 1) of as many digits as the dtype keeps of all of them."""
    shift, half, unit = _UNITS[out.dtype]
    work = out if half.dtype == out.dtype else _work(words, out)
    work.copy_(words.signed().bitwise_right_shift_(shift))
    torch.add(half, work, alpha=unit, out=work)  # exact: no digit is lost
    if work is not out:
        out.copy_(work)


def normal(mean: float = 0, std: float = 1) -> Sampler:
    """Return what samples a normal distribution: a point's distance, and the sine of its angle.

    An angle of one side has the same distribution of sines as one of the whole circle.
    """

    def sample(words: Words, out: Tensor) -> None:
        if out.dtype == torch.float64:
            values = _point(words, words.stream(1), out)
        else:
            values = _point(words, None, _work(words, out))
        _moved(values, mean, std, out)

    return sample


def _point(distances: Words, angles: Words | None, work: Tensor) -> Tensor:
    """Return normal numbers, of two words or of the two halves of one."""
    scratch, dtype = distances.scratch, work.dtype
    bits = 32 if angles is None else 63
    word = distances.signed()
    upper = torch.bitwise_right_shift(word, constant(32), out=scratch.get("mixing", torch.int64))
    angle = scratch.slot(4, dtype)
    if angles is None:
        angle.copy_(upper).mul_(constant(2.0**-32, dtype))
    # All bits above the lower ones are set, and the last one: an odd number below 0.
    word.bitwise_xor_(upper).bitwise_or_(constant(1 - (1 << bits)))
    negative = scratch.slot(0, dtype).copy_(word)
    square = logarithm_of_negative(negative, bits, -2.0, scratch)
    if angles is not None:
        angle.copy_(angles.signed()).mul_(constant(2.0**-64, dtype))
    return torch.mul(sine_of_turns(angle, scratch), square.sqrt_(), out=work)


def normal_of(dtype: torch.dtype, mean: float = 0, std: float = 1) -> Sampler:
    """Return what samples normal numbers; the parts of complex ones have half of the variance."""
    return _of_parts(normal(mean, std / math.sqrt(2))) if dtype.is_complex else normal(mean, std)


def uniform_of(dtype: torch.dtype, low: float = 0, high: float = 1) -> Sampler:
    """Return what samples [low, high), and both parts of complex numbers."""
    return _of_parts(uniform(low, high)) if dtype.is_complex else uniform(low, high)


def _of_parts(sample_part: Sampler) -> Sampler:
    def sample(words: Words, out: Tensor) -> None:
        part = words.scratch.get("one_part", out.real.dtype)
        for index, target in enumerate((out.real, out.imag)):
            sample_part(words.stream(2 * index), part)
            target.copy_(part)

    return sample


def bernoulli(p: float = 0.5) -> Sampler:
    """Return what samples 1 with probability ``p``, and 0."""
    threshold = _LOWEST + round(p * (1 << 64))

    def sample(words: Words, out: Tensor) -> None:
        if threshold > -_LOWEST - 1:
            out.fill_(1)
        elif out.dtype == torch.bool:
            torch.lt(words.signed(), threshold, out=out)
        else:
            is_one = words.scratch.get("is_one", torch.bool)
            out.copy_(torch.lt(words.signed(), threshold, out=is_one))

    return sample


def words(words: Words, out: Tensor) -> None:
    """Write 64 random bits that no other element has in this draw."""
    out.copy_(words.signed())


def positive_words(words: Words, out: Tensor) -> None:
    """Write 63 random bits."""
    out.copy_(words.positive())


def integers(low: int, high: int) -> Sampler:
    """Return what samples the integers from ``low`` up to and without ``high``.

    No integer is likelier than another one by more than 2**-20.
    """
    count = high - low
    bits = 63 - count.bit_length()

    def sample(words: Words, out: Tensor) -> None:
        if count <= 1 << 20:
            word = words.upper(bits).mul_(constant(count))
            word.add_(constant(count << bits - 1)).bitwise_right_shift_(constant(bits))
        elif count == 1 << 64:
            second = words.stream(1).signed() << constant(32)
            word = words.positive().bitwise_xor_(second)
        elif count & (count - 1) == 0:
            word = words.positive().bitwise_and_(count - 1)
        elif count <= 1 << 40:
            word = words.positive().remainder_(count)
        else:
            word = share(words.positive(), count)
        out.copy_(word.add_(low) if low else word)

    return sample


def share(bits: Tensor, count: int | Tensor) -> Tensor:
    """Return ``bits * count / 2**63``, rounded down or one less, from products of halves."""
    upper, lower = bits >> 32, bits & (1 << 32) - 1
    small = (upper * (count & (1 << 32) - 1) >> 31) + ((lower >> 1) * (count >> 32) >> 30)
    return upper.mul_((count >> 32) * 2).add_(small)


def exponential(rate: float = 1) -> Sampler:
    """Return what samples an exponential distribution; never 0, which its users divide by."""

    def sample(words: Words, out: Tensor) -> None:
        values = _negative_logarithm(words, _work_dtype(out.dtype))
        _moved(values, 0, 1 / rate, out)
        out.clamp_(min=torch.finfo(out.dtype).tiny)

    return sample


def _negative_logarithm(words: Words, dtype: torch.dtype) -> Tensor:
    """Return ``-log(u)`` of uniform numbers in (0, 1]."""
    word = words.signed() if dtype == torch.float32 else words.positive()
    word.bitwise_or_(constant(_LOWEST + 1))
    negative = words.scratch.slot(0, dtype).copy_(word)
    return logarithm_of_negative(negative, 63, -1.0, words.scratch)


def geometric(p: float) -> Sampler:
    """Return what samples the number of trials until the first success."""
    trials = _trials_per_unit(p)

    def sample(words: Words, out: Tensor) -> None:
        if trials == 0:
            out.fill_(1)
            return
        values = _negative_logarithm(words, torch.float64)
        out.copy_(values.mul_(trials).ceil_().clamp_(min=1))

    return sample


def _trials_per_unit(p: float) -> float:
    """Return ``-1 / log(1 - p)``, rounded alike everywhere, which ``math.log1p`` may not be."""
    with localcontext() as context:
        context.prec = 400 if p < 1e-30 else 60
        return 0.0 if p >= 1 else float(-1 / (1 - Decimal(p)).ln())


def log_normal(mean: float = 1, std: float = 2) -> Sampler:
    """Return what samples numbers whose logarithm has a normal distribution."""
    logarithm = normal(mean, std)

    def sample(words: Words, out: Tensor) -> None:
        work = words.scratch.get("part", _work_dtype(out.dtype))
        logarithm(words, work)
        out.copy_(exponential_(work, words.scratch))

    return sample


def cauchy(median: float = 0, sigma: float = 1) -> Sampler:
    """Return what samples a Cauchy distribution."""

    def sample(words: Words, out: Tensor) -> None:
        dtype = _work_dtype(out.dtype)
        bits = _BITS[dtype] - 1
        turns = words.scratch.slot(4, dtype)
        scaled(words.upper(bits), 0.5, 0, turns).mul_(constant(2.0**-bits, dtype))
        _moved(tangent_of_turns(turns, words.scratch), median, sigma, out)

    return sample


def _moved(values: Tensor, center: float, scale: float, out: Tensor) -> None:
    if scale != 1:
        values.mul_(scale)
    if center != 0:
        values.add_(center)
    if values is not out:
        out.copy_(values)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, or one that is exact enough to compute in."""
    if dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.float64


def _work(words: Words, out: Tensor) -> Tensor:
    """Return ``out``, or a tensor like it of a dtype that is exact enough to compute in."""
    dtype = _work_dtype(out.dtype)
    return out if dtype == out.dtype else words.scratch.get("part", dtype)


@kept(256)
def _below(number: float, dtype: torch.dtype) -> float:
    """Return the largest number of ``dtype`` below ``number``, as a Python number."""
    end = torch.tensor(number, dtype=dtype, device="cpu")
    return torch.nextafter(end, torch.full_like(end, -math.inf)).item()
