"""What makes random numbers the same on every device, and samplers with tensors for parameters."""

# pyright: reportUnknownLambdaType=false
# One line per distribution.

from __future__ import annotations

import math
import os
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt.dtensor import Box
from dtckpt.dtensor.random import counter_rng, parameter_samplers, portable_math, samplers
from dtckpt.dtensor.random.counter_rng import draw_keys, fill, scattered_indices
from dtckpt.dtensor.random.kept import Scratch
from dtckpt.dtensor.random.shuffling import order_of
from tests.python import run_python

COUNT = 100_000

FUNCTIONS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]] = [
    (portable_math.log, torch.log, torch.logspace(-307, 307, 9001, dtype=torch.float64)),
    (portable_math.log, torch.log, torch.logspace(-37, 37, 9001)),
    (portable_math.log, torch.log, torch.linspace(0.99, 1.01, 9001, dtype=torch.float64)),
    (portable_math.exp, torch.exp, torch.linspace(-800, 720, 9001, dtype=torch.float64)),
    (portable_math.exp, torch.exp, torch.linspace(-120, 100, 9001)),
    (portable_math.log_gamma, torch.lgamma, torch.logspace(0, 40, 9001, dtype=torch.float64)),
]


@pytest.mark.parametrize(("ours", "theirs", "at"), FUNCTIONS)
def test_functions(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], at: Tensor
) -> None:
    eps = torch.finfo(at.dtype).eps
    scale = 300 if ours is portable_math.log_gamma else 4
    torch.testing.assert_close(ours(at), theirs(at), rtol=scale * eps, atol=scale * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_turns(dtype: torch.dtype) -> None:
    at = torch.linspace(-0.499, 0.499, 4001, dtype=dtype)
    scratch = Scratch(at.shape, at.device)
    exact = at.double() * math.pi
    eps = torch.finfo(dtype).eps
    sine = portable_math.sine_of_turns(at, scratch).double()
    torch.testing.assert_close(sine, exact.sin(), rtol=4 * eps, atol=0)
    tangent = portable_math.tangent_of_turns(at.clone(), scratch).double()
    torch.testing.assert_close(tangent, exact.tan(), rtol=200 * eps, atol=0)


def test_the_ends_of_functions() -> None:
    ends = torch.tensor([-math.inf, -1e9, 0, 1e9, math.inf, math.nan])
    found = portable_math.exp(ends)
    assert found[:3].tolist() == [0, 0, 1]
    assert found[3:5].isinf().all()
    assert found[5].isnan()
    assert portable_math.log(torch.ones(3)).tolist() == [0, 0, 0]


NAMES = """
    __rshift__ _local_scalar_dense abs abs_ add add_ addcmul_ all any arange bitwise_and
    bitwise_and_ bitwise_left_shift_ bitwise_not bitwise_or bitwise_or_ bitwise_right_shift
    bitwise_right_shift_ bitwise_xor_ ceil_ clamp_ clone copy_ detach div div_ empty empty_like
    floor floor_ full_like ge gt index index_fill_ index_put_ isnan le lift_fresh lt mul mul_
    neg nextafter nonzero ones_like reciprocal reciprocal_ remainder_ round_ rsub scalar_tensor
    slice sqrt sqrt_ squeeze sub sub_ view where zeros_like
"""
EXACT = frozenset(NAMES.split())
"""Operators that IEEE 754 or the arithmetic of integers defines to the last bit."""


class OnlyExact(TorchDispatchMode):
    """Within it, an operator raises that devices may round in ways of their own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        assert name in EXACT, f"{func} is not the same on all devices"
        floats = any(isinstance(a, Tensor) and a.is_floating_point() for a in args)
        alpha = (kwargs or {}).get("alpha", 1)
        assert not floats or math.frexp(alpha)[0] == 0.5, f"{func} with alpha={alpha}"
        assert not (floats and name.startswith("addc")), f"{func} rounds once or twice"
        by_number = name in ("div", "div_") and not (
            isinstance(args[1], Tensor) and args[1].ndim > 0
        )
        assert not by_number, f"{func} by a number is a product on some devices"
        return func(*args, **(kwargs or {}))


SAMPLERS: list[tuple[str, Any]] = [
    ("uniform", samplers.uniform()),
    ("uniform_between", samplers.uniform(-0.3, 0.7)),
    ("normal", samplers.normal(1, 3)),
    ("bernoulli", samplers.bernoulli(0.3)),
    ("integers", samplers.integers(-3, 14)),
    ("many_integers", samplers.integers(0, 10**8)),
    ("wide_integers", samplers.integers(0, 10**15)),
    ("exponential", samplers.exponential(0.7)),
    ("geometric", samplers.geometric(0.2)),
    ("log_normal", samplers.log_normal(0, 0.5)),
    ("cauchy", samplers.cauchy(1, 2)),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", [s for _, s in SAMPLERS], ids=[n for n, _ in SAMPLERS])
@pytest.mark.parametrize("count", [100, 9000])
def test_samplers_use_exact_operators_only(sampler: Any, dtype: torch.dtype, count: int) -> None:
    out = torch.empty(count, dtype=dtype)
    with OnlyExact():
        fill(out, (count,), Box.whole((count,)), draw_keys(0, 0), sampler)


def digest() -> str:
    """Return a digest of samples of all distributions."""
    found = blake2b(digest_size=8)
    for dtype in DTYPES:
        for _, sampler in SAMPLERS:
            out = torch.empty(1003, dtype=dtype)
            fill(out, (1003,), Box.whole((1003,)), draw_keys(3, 4), sampler)
            found.update(out.double().numpy().tobytes())
    for _, sampler, parameters in PARAMETERS:
        found.update(drawn(sampler, parameters, 1003).numpy().tobytes())
    return found.hexdigest()


def test_other_vector_units_draw_the_same() -> None:
    code = (
        "import torch; from tests.dtensor.random.test_portable_random import digest; "
        "print(torch.backends.cpu.get_cpu_capability(), digest())"
    )
    expected = digest()
    for capability in ("default", "avx2"):
        made = run_python("-c", code, env=os.environ | {"ATEN_CPU_CAPABILITY": capability})
        units, found = made.stdout.split() or ("none", made.stderr[-500:])
        assert units in (capability.upper(), "DEFAULT")  # of other processors all are
        assert found == expected, capability


def test_the_watch_over_operators_notices() -> None:
    x = torch.ones(3)
    for op in (
        lambda: x.log(),
        lambda: x.add(x, alpha=3),
        lambda: x / 3,
        lambda: x.addcmul(x, x),
        lambda: torch.lerp(x, x, 0.5),
    ):
        with pytest.raises(AssertionError), OnlyExact():
            op()


PARAMETERS: list[tuple[str, Any, list[float]]] = [
    ("few_events", parameter_samplers.poisson, [3.5]),
    ("many_events", parameter_samplers.poisson, [40.0]),
    ("few_successes", parameter_samplers.binomial, [20.0, 0.3]),
    ("many_successes", parameter_samplers.binomial, [300.0, 0.6]),
    ("gamma", parameter_samplers.standard_gamma, [0.6]),
]


def drawn(sampler: Any, parameters: list[float], count: int = COUNT, seed: int = 0) -> Tensor:
    out = torch.empty(count, dtype=torch.float64)
    given = [torch.full_like(out, p) for p in parameters]
    fill(out, (count,), Box.whole((count,)), draw_keys(seed, 0), sampler, *given)
    return out


@pytest.mark.parametrize(
    ("sampler", "parameters"), [p[1:] for p in PARAMETERS], ids=[p[0] for p in PARAMETERS]
)
def test_samplers_with_parameters_use_exact_operators_only(
    sampler: Any, parameters: list[float]
) -> None:
    with OnlyExact():
        drawn(sampler, parameters, 3000)


def counts_differ(found: Tensor, log_probability: Callable[[Tensor], Tensor]) -> float:
    """Return by how many deviations counts miss their probabilities (chi-square)."""
    values = torch.arange(int(found.max().item()) + 1, dtype=torch.float64)
    expected = log_probability(values).exp() * len(found)
    observed = torch.bincount(found.long()).double()
    enough = expected > 8
    cells = ((observed - expected) ** 2 / expected)[enough]
    return (cells.sum().item() - len(cells)) / math.sqrt(2 * len(cells))


@pytest.mark.parametrize("rate", [0.3, 4.0, 9.9, 10.1, 33.0, 500.0])
def test_poisson(rate: float) -> None:
    found = drawn(parameter_samplers.poisson, [rate])

    def log_probability(k: Tensor, rate: float = rate) -> Tensor:
        return k * math.log(rate) - rate - torch.lgamma(k + 1)

    assert abs(counts_differ(found, log_probability)) < 4.5
    assert abs(counts_differ(found, lambda k: log_probability(k, rate * 1.02 + 0.02))) > 4.5


@pytest.mark.parametrize(
    ("trials", "p"), [(1, 0.3), (20, 0.5), (50, 0.93), (90, 0.4), (400, 0.7), (10_000, 0.01)]
)
def test_binomial(trials: int, p: float) -> None:
    found = drawn(parameter_samplers.binomial, [float(trials), p])

    def log_probability(k: Tensor, p: float = p) -> Tensor:
        ways = math.lgamma(trials + 1) - torch.lgamma(k + 1) - torch.lgamma(trials - k + 1)
        return ways + k * math.log(p) + (trials - k) * math.log1p(-p)

    assert abs(counts_differ(found, log_probability)) < 4.5
    assert abs(counts_differ(found, lambda k: log_probability(k, p * 0.97))) > 4.5


@pytest.mark.parametrize("alpha", [0.1, 0.9, 1.0, 3.0, 200.0])
def test_gamma(alpha: float) -> None:
    found = drawn(parameter_samplers.standard_gamma, [alpha]).sort().values
    steps = torch.arange(1, COUNT + 1) / COUNT
    for shape, is_right in ((alpha, True), (alpha * 1.03, False)):
        wanted = torch.special.gammainc(torch.full_like(found, shape), found)
        assert ((wanted - steps).abs().max().item() * math.sqrt(COUNT) < 1.95) is is_right


def test_parameters_at_their_ends() -> None:
    poisson, binomial, gamma = (p[1] for p in (PARAMETERS[0], PARAMETERS[2], PARAMETERS[4]))
    assert not drawn(poisson, [0.0], 50).any()
    assert not drawn(binomial, [9.0, 0.0], 50).any()
    assert not drawn(binomial, [0.0, 0.5], 50).any()
    assert not drawn(binomial, [-3.0, 0.5], 50).any()
    assert (drawn(binomial, [9.0, 1.0], 50) == 9).all()
    assert drawn(binomial, [9.0, math.nan], 50).isnan().all()
    assert not drawn(gamma, [0.0], 50).any()
    assert drawn(gamma, [math.nan], 50).isnan().all()
    assert drawn(gamma, [-1.0], 50).isnan().all()
    assert (drawn(gamma, [1e-5], 50) > 0).all()
    assert abs(drawn(poisson, [1e15], 50).mean().item() - 1e15) < 1e9


def test_scattered_numbers_are_one_thing_however_they_come() -> None:
    cpu, shape = torch.device("cpu"), (3 * counter_rng.KEPT,)
    whole = scattered_indices(shape, Box.whole(shape), cpu)
    assert whole.unique().numel() == whole.numel()
    for start, count in ((0, 10), (counter_rng.KEPT - 5, 10), (200_001, 100_000)):
        box = Box((start,), (count,))
        pieces = [p.clone() for p, _ in counter_rng.pieces(shape, box, cpu)]
        assert torch.equal(torch.cat(pieces), whole[start : start + count])


@pytest.mark.parametrize("count", [0, 1, 2, 500, 20_000, 40_000])
def test_orders(count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for keys in (max(count // 4, 1), 1 << 30):  # many words whose upper halves are equal, or none
        upper = torch.randint(-keys, keys, (count,), generator=generator) << 32
        words = (upper | torch.randint(0, 1 << 32, (count,), generator=generator)).unique()
        words = words[torch.randperm(len(words), generator=generator)]
        assert torch.equal(order_of(words), words.argsort())
