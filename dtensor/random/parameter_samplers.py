"""Distributions whose parameters are tensors: one element's parameters for each sample.

All compute in float64 with operators that round alike everywhere, so that a sample has the same
bits on every device. Those that may reject a number try again for the elements that are left, with
the words of that attempt; what an element gets does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .counter_rng import Words, scaled
from .kept import constant
from .portable_math import exp, log, log_gamma
from .samplers import normal

MAX_ATTEMPTS = 1000
"""All of these distributions reject a number with a probability below 1/2."""

_SEARCHED = 10
"""Counts whose mean is below it are found by adding up probabilities, in that many steps or so."""

_MOST_STEPS = 200

_standard_normal = normal()


def poisson(words: Words, out: Tensor, rate: Tensor) -> None:
    """Write counts of events that come at ``rate``, which is 0 or more."""
    mean = rate.double()
    _two_ways(words, out, mean < _SEARCHED, _few_events, _many_events, mean)


def _few_events(words: Words, mean: Tensor) -> Tensor:
    def ratio(step: int) -> Tensor:
        return mean * (1 / step)  # a quotient by a number is a product on some devices

    return _searched(_fraction(words.further(0)), exp(mean.neg()), ratio)


def _searched(chance: Tensor, first: Tensor, ratio: Callable[[int], Tensor]) -> Tensor:
    """Return the count at which the probabilities, added up, come to ``chance``.

    ``first`` is that of 0, ``ratio(k)`` that of k over that of k - 1.
    """
    count, total, term = torch.zeros_like(chance), first.clone(), first.clone()
    for step in range(1, _MOST_STEPS):
        is_above = chance > total
        if not is_above.any():
            break
        count.add_(is_above)
        total.add_(term.mul_(ratio(step)))
    return count


def _many_events(words: Words, mean: Tensor) -> Tensor:
    """Return counts by the transformed rejection of Hoermann (1993), PTRS."""
    b = mean.sqrt().mul_(2.53).add_(0.931)
    return _tried(words, _attempt_events, mean, b)


def _attempt_events(words: Words, mean: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    hat = _Hat.drawn(words, (b * 0.02483).sub_(0.059), b)
    count = hat.number().add_(mean).add_(0.43).floor_()
    bound = (b - 2).reciprocal_().mul_(-3.6224).add_(0.9277)
    possible = (count >= 0) & ((hat.distance >= 0.013) | (hat.height <= hat.distance))

    def test(at: Tensor) -> Tensor:
        here, k, center = hat.at(at), count[at], mean[at]
        inverse = (here.b - 3.4).reciprocal_().mul_(1.1328).add_(1.1239)
        lift = here.lift().add_(log(inverse))
        return lift <= log(center).mul_(k).sub_(center).sub_(log_gamma(k + 1))

    sure = (hat.distance >= 0.07) & (hat.height <= bound)
    return count, _settled(sure, possible, test)


def binomial(words: Words, out: Tensor, count: Tensor, prob: Tensor) -> None:
    """Write how many of ``count`` trials succeed, each with probability ``prob``."""
    number, chance = count.double().floor(), prob.double()
    is_likely = chance > 0.5
    rare = torch.where(is_likely, 1 - chance, chance)
    is_drawn = (rare > 0) & (number > 0)
    trials = torch.where(is_drawn, number, 1)
    rare = torch.where(is_drawn, rare, 0.25)
    found = torch.empty_like(trials)
    is_searched = trials * rare < _SEARCHED
    _two_ways(words, found, is_searched, _few_successes, _many_successes, trials, rare)
    found = torch.where(is_drawn, found, 0)
    found = torch.where(is_likely, number - found, found)
    found.clamp_(min=0)
    out.copy_(torch.where(chance.isnan() | count.isnan(), torch.nan, found))


def _few_successes(words: Words, trials: Tensor, p: Tensor) -> Tensor:
    odds = p / (1 - p)

    def ratio(step: int) -> Tensor:
        return (trials - (step - 1)).clamp_(min=0).mul_(1 / step).mul_(odds)

    first = exp(log(1 - p).mul_(trials))
    return _searched(_fraction(words.further(0)), first, ratio)


def _many_successes(words: Words, trials: Tensor, p: Tensor) -> Tensor:
    """Return counts by the transformed rejection of Hoermann (1993), BTRS."""
    deviation = (trials * p).mul_(1 - p).sqrt_()
    return _tried(words, _attempt_successes, trials, p, deviation)


def _attempt_successes(
    words: Words, trials: Tensor, p: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    b = (deviation * 2.53).add_(1.15)
    hat = _Hat.drawn(words, (b * 0.0248).sub_(0.0873).add_(p * 0.01), b)
    count = hat.number().add_(trials * p).add_(0.5).floor_()
    possible = (count >= 0) & (count <= trials)

    def test(at: Tensor) -> Tensor:
        here, k, n, chance = hat.at(at), count[at], trials[at], p[at]
        alpha = here.b.reciprocal().mul_(5.1).add_(2.83).mul_(deviation[at])
        mode = ((n + 1) * chance).floor_()
        level = (k - mode).mul_(log(chance / (1 - chance)))
        level.add_(log_gamma(mode + 1)).add_(log_gamma(n - mode + 1))
        level.sub_(log_gamma(k + 1)).sub_(log_gamma(n - k + 1))
        return here.lift().add_(log(alpha)) <= level

    bound = b.reciprocal().mul_(-4.2).add_(0.92)
    sure = possible & (hat.distance >= 0.07) & (hat.height <= bound)
    return count, _settled(sure, possible, test)


def standard_gamma(words: Words, out: Tensor, alpha: Tensor) -> None:
    """Write samples of gamma distributions of scale 1, by the method of Marsaglia and Tsang.

    One of a shape below 1 is that of a shape larger by 1 times a power of a uniform number.
    """
    shape = alpha.double()
    is_drawn = shape > 0
    positive = torch.where(is_drawn, shape, 1)
    is_low = positive < 1
    d = torch.where(is_low, positive + 1, positive).sub_(1 / 3)
    c = (d * 9).sqrt_().reciprocal_()

    found = _tried(words, _attempt_gamma, d, c)
    power = exp(log(_fraction(words.further(0))).div_(positive))
    found = torch.where(is_low, found * power, found)
    # Zero for a shape of 0, and no number for one that is none.
    found = torch.where(is_drawn, found.clamp_(min=torch.finfo(out.dtype).tiny), shape * 0)
    out.copy_(torch.where(shape < 0, torch.nan, found))


def _attempt_gamma(words: Words, d: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.empty_like(d)
    _standard_normal(words, x)
    root = (x * c).add_(1)
    possible = root > 0
    cube = root * root * root
    square = x * x
    chance = _fraction(words.stream(2))
    sure = possible & (chance < (square * square).mul_(-0.0331).add_(1))

    def test(at: Tensor) -> Tensor:
        level = (1 - cube[at]).add_(log(cube[at])).mul_(d[at])
        return log(chance[at]) < level.add_(square[at].mul_(0.5))

    return cube * d, _settled(sure, possible, test)


def _two_ways(
    words: Words,
    out: Tensor,
    is_first: Tensor,
    first: Callable[..., Tensor],
    second: Callable[..., Tensor],
    *parameters: Tensor,
) -> None:
    """Write what ``first`` returns for some elements, and what ``second`` does for the others."""
    for chosen, sample in ((is_first, first), (~is_first, second)):
        if chosen.all():
            out.copy_(sample(words, *parameters))
        elif chosen.any():
            at = chosen.nonzero().squeeze(1)
            made = sample(words.of(at), *[parameter[at] for parameter in parameters])
            out[at] = made.to(out.dtype)


def _tried(words: Words, attempt: Callable[..., tuple[Tensor, ...]], *parameters: Tensor) -> Tensor:
    """Return what ``attempt`` accepts; it returns numbers, and which of them it does.

    What is no number is accepted, too: infinite parameters lead there.
    """
    found, is_accepted = attempt(words.further(1), *parameters)
    left = (~is_accepted & ~found.isnan()).nonzero().squeeze(1)
    for number in range(2, MAX_ATTEMPTS):
        if left.numel() == 0:
            break
        given = [parameter[left] for parameter in parameters]
        made, is_accepted = attempt(words.of(left).further(number), *given)
        found[left] = made
        left = left[~is_accepted & ~made.isnan()]
    found[left] = torch.nan
    return found


def _fraction(words: Words) -> Tensor:
    """Return numbers between 0 and 1, neither of which they are."""
    word = words.upper(52)
    out = torch.empty(word.shape, dtype=torch.float64, device=word.device)
    return scaled(word, 0.5, 0, out).mul_(constant(2.0**-52, out.dtype)).add_(0.5)


class _Hat(NamedTuple):
    """Places under the hats of some distributions, whose forms are ``a`` and ``b``."""

    across: Tensor
    """From -1/2 to 1/2."""
    height: Tensor
    """From 0 to 1."""
    distance: Tensor
    """How far the first number is from its ends."""
    a: Tensor
    b: Tensor

    @classmethod
    def drawn(cls, words: Words, a: Tensor, b: Tensor) -> _Hat:
        """Return random places."""
        across = _fraction(words).sub_(0.5)
        return cls(across, _fraction(words.stream(1)), 0.5 - across.abs(), a, b)

    def at(self, elements: Tensor) -> _Hat:
        """Return those of some of the elements."""
        return _Hat(*[tensor[elements] for tensor in self])

    def number(self) -> Tensor:
        """Return numbers that have about the wanted distribution, but for its mean."""
        return (self.a * 2).div_(self.distance).add_(self.b).mul_(self.across)

    def lift(self) -> Tensor:
        """Return the logarithms of the heights, and of what the hat is stretched by there."""
        stretch = self.a.div(self.distance * self.distance).add_(self.b)
        return log(self.height).sub_(log(stretch))


def _settled(sure: Tensor, possible: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what is accepted: what is sure, and of the other elements what passes the test."""
    at = (possible & ~sure).nonzero().squeeze(1)
    if at.numel():
        sure[at] = test(at)
    return sure
