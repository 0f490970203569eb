"""Distributions, made of random words that are given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .counter_rng import Sampler, Words, constant, scaled

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
_LOWER_HALF = (1 << 32) - 1


def uniform(low: float = 0, high: float = 1) -> Sampler:
    """Return what samples [low, high)."""
    if (low, high) == (0, 1):
        return _fractions

    def sample(words: Words, out: Tensor) -> None:
        work = _work(out)
        _fractions(words, work)
        work.mul_(high - low).add_(low)
        if work is not out:
            out.copy_(work)
        out.clamp_(max=_below(high, out.dtype) if high > low else high)

    return sample


def _fractions(words: Words, out: Tensor) -> None:
    """Write numbers in [0, 1) of as many digits as the dtype keeps of all of them."""
    dtype = out.dtype
    shift, half, unit = _UNITS[dtype]
    work = out if half.dtype == dtype else _work(out)
    work.copy_(words.signed().bitwise_right_shift_(shift))
    torch.add(half, work, alpha=unit, out=work)  # exact: no digit is lost
    if work is not out:
        out.copy_(work)


def normal(mean: float = 0, std: float = 1) -> Sampler:
    """Return what samples a normal distribution: the angle and the radius of a point."""

    def real(words: Words, out: Tensor) -> None:
        work = _work(out)
        bits = words.positive()
        radius = scaled(bits >> 32, 2.0**-32, -31, work).log_().mul_(-2).sqrt_()
        angle = torch.mul(bits.bitwise_and_(_LOWER_HALF), math.tau / (1 << 32), out=_like(work))
        radius.mul_(angle.cos_())
        _moved(radius, mean, std, out)

    return real


def complex_normal(mean: float = 0, std: float = 1) -> Sampler:
    """Return what samples complex numbers whose two parts have half of the variance each."""
    sample_part = normal(mean, std / math.sqrt(2))

    def sample(words: Words, out: Tensor) -> None:
        part = torch.empty(out.shape, dtype=out.real.dtype, device=out.device)
        for index, target in enumerate((out.real, out.imag)):
            sample_part(words.stream(index), part)
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
            out.copy_(words.signed() < threshold)

    return sample


def integers(low: int, high: int) -> Sampler:
    """Return what samples the integers from ``low`` up to and without ``high``."""
    count = high - low

    def sample(words: Words, out: Tensor) -> None:
        bits = words.positive()
        if count == 1 << 64:
            bits.bitwise_xor_(words.stream(1).signed() << 32)
        elif count & (count - 1) == 0:
            bits.bitwise_and_(count - 1)
        elif count <= 1 << 40:  # some remainders are likelier by less than 2**-23
            bits.remainder_(count)
        else:
            bits = _share(bits, count)
        out.copy_(bits.add_(low))

    return sample


def _share(bits: Tensor, count: int) -> Tensor:
    """Return ``bits * count / 2**63``, rounded down or one less, from products of halves."""
    upper, lower = bits >> 32, bits & _LOWER_HALF
    small = (upper * (count & _LOWER_HALF) >> 31) + ((lower >> 1) * (count >> 32) >> 30)
    return upper.mul_(2 * (count >> 32)).add_(small)


def exponential(rate: float = 1) -> Sampler:
    """Return what samples an exponential distribution; never 0, which its users divide by."""

    def sample(words: Words, out: Tensor) -> None:
        work = _positive_fraction(words, out)
        out.copy_(work.log_().mul_(-1 / rate)).clamp_(min=torch.finfo(out.dtype).tiny)

    return sample


def geometric(p: float) -> Sampler:
    """Return what samples the number of trials until the first success."""

    def sample(words: Words, out: Tensor) -> None:
        work = _positive_fraction(words, out)
        if p < 1:
            work.log_().div_(math.log1p(-p)).ceil_()
        out.copy_(work.clamp_(min=1) if p < 1 else work.fill_(1))

    return sample


def log_normal(mean: float = 1, std: float = 2) -> Sampler:
    """Return what samples numbers whose logarithm has a normal distribution."""
    logarithm = normal(mean, std)

    def sample(words: Words, out: Tensor) -> None:
        work = _work(out)
        logarithm(words, work)
        out.copy_(work.exp_())

    return sample


def cauchy(median: float = 0, sigma: float = 1) -> Sampler:
    """Return what samples a Cauchy distribution."""

    def sample(words: Words, out: Tensor) -> None:
        work = _work(out)
        bits = _BITS[work.dtype]
        scaled(words.upper(bits), 0.5, 0, work).mul_(math.ldexp(math.pi, -bits)).tan_()
        _moved(work, median, sigma, out)

    return sample


def _positive_fraction(words: Words, out: Tensor) -> Tensor:
    """Return numbers in (0, 1] to compute with."""
    return scaled(words.positive(), 2.0**-64, -63, _work(out))


def _moved(values: Tensor, center: float, scale: float, out: Tensor) -> None:
    if scale != 1:
        values.mul_(scale)
    if center != 0:
        values.add_(center)
    if values is not out:
        out.copy_(values)


def _work(out: Tensor) -> Tensor:
    """Return ``out``, or a tensor like it of a dtype that is exact enough to compute in."""
    if out.dtype in (torch.float32, torch.float64):
        return out
    dtype = torch.float32 if out.is_floating_point() else torch.float64
    return torch.empty(out.shape, dtype=dtype, device=out.device)


def _like(work: Tensor) -> Tensor:
    return torch.empty_like(work)


def _below(number: float, dtype: torch.dtype) -> float:
    """Return the largest number of ``dtype`` below ``number``, as a Python number."""
    end = torch.tensor(number, dtype=dtype)
    return torch.nextafter(end, torch.full_like(end, -math.inf)).item()
