"""Random numbers: every element is drawn where it lies, by its global index.

Those whose mean or probability is a tensor are made of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import UnsupportedOp

from ..random import samplers
from ..random.counter_rng import Sampler
from ..random.filling import check_parameters, drawer
from ..tensor.schemas import Op, base_name, is_in_place
from ..tensor.wrapper import Wrapper
from .engine.dims import all_dims
from .engine.factors import Factors
from .engine.forms import operators
from .engine.primitives import reduced
from .engine.rules import alike
from .engine.table import LocalCall, LocalMaker, OpCall, Rule, decomposition, in_any_order, rule

aten = torch.ops.aten


def _integers(dtype: torch.dtype, *bounds: int | None) -> Sampler:
    low, high = (0, *bounds) if len(bounds) == 1 else (*bounds, 0, None)[:2]
    return samplers.integers(low or 0, _end(dtype, low or 0) if high is None else high)


def _end(dtype: torch.dtype, low: int) -> int:
    """Return what follows the last integer that is drawn where none is named."""
    if low == -(1 << 63):  # as torch has it: all integers
        return 1 << 63
    if dtype.is_floating_point:  # up to where the dtype has gaps
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _of_any_dtype(make: Callable[..., Sampler]) -> Callable[..., Sampler]:
    def made(_: torch.dtype, *parameters: float) -> Sampler:
        return make(*parameters)

    return made


_INTEGERS = (
    "randint_like randint_like.generator randint_like.low_dtype randint_like.low_generator_dtype"
    " random random.from random.to"
)

_SAMPLERS: Mapping[Op, tuple[str, Callable[..., Sampler]]] = {
    aten.bernoulli.p: ("bernoulli_", _of_any_dtype(samplers.bernoulli)),
    aten.cauchy.default: ("cauchy_", _of_any_dtype(samplers.cauchy)),
    aten.exponential.default: ("exponential_", _of_any_dtype(samplers.exponential)),
    aten.geometric.default: ("geometric_", _of_any_dtype(samplers.geometric)),
    aten.log_normal.default: ("log_normal_", _of_any_dtype(samplers.log_normal)),
    **dict.fromkeys(
        operators(aten, "normal_functional randn_like randn_like.generator"),
        ("normal_", samplers.normal_of),
    ),
    **dict.fromkeys(
        operators(aten, "rand_like rand_like.generator uniform"), ("uniform_", samplers.uniform_of)
    ),
    **dict.fromkeys(operators(aten, _INTEGERS), ("random_", _integers)),
}
"""By functional operator, the method that does the same in place, and what makes its sampler."""


@rule(*_SAMPLERS)
def sampled_rule(call: OpCall) -> Rule:
    """Any layout, with Replicate for Partial."""
    refuse_generator(call.op, call.kwargs.get("generator"))
    spec, output = call.specs[0], call.outputs[0]
    dtype = spec.dtype if output is None else output.dtype
    method, make = _SAMPLERS[call.op]
    check_parameters(method, dtype, *call.args[1:])
    dims = all_dims(spec.ndim)
    # What is written in place must lie as it does afterwards, even if its values do not matter.
    is_new = base_name(call.op).endswith("_like")
    local = _drawing(make(dtype, *call.args[1:]))
    return Factors(call, (dims,), (dims,), ignores_values=is_new, local=local)


def refuse_generator(op: Op, generator: object) -> None:
    """Raise UnsupportedOp for a ``generator=`` argument."""
    if generator is not None:
        raise UnsupportedOp(
            f"{op}: a generator= is one rank's, and the ranks of a DTensor need the same numbers; "
            "leave it out, and seed the mesh with dtckpt.dtensor.random.manual_seed"
        )


def _drawing(sampler: Sampler) -> LocalMaker:
    @in_any_order
    def maker(local: LocalCall) -> Callable[..., Tensor]:
        spec = local.outputs[0] or local.inputs[0]
        draw, in_place = drawer(spec, sampler), is_in_place(local.op)

        def run(tensor: Tensor, *_: Any, **kwargs: Any) -> Tensor:
            out = tensor
            if not in_place:
                given = {n: v for n, v in kwargs.items() if n not in ("generator", "dtype")}
                out: Tensor = torch.empty_like(tensor, dtype=spec.dtype, **given)
            draw(out)
            return out

        return run

    return maker


@rule(aten.native_dropout.default)
def dropout_rule(call: OpCall) -> Rule:
    """Elements are kept or dropped by their global index."""
    p, train = call.arg("p"), call.arg("train")
    check_parameters("bernoulli_", call.specs[0].dtype, 1 - p)

    @in_any_order
    def maker(local: LocalCall) -> Callable[..., tuple[Tensor, Tensor]] | None:
        mask_spec = local.outputs[1]
        if mask_spec is None:
            return None
        if train is False:
            return _kept_by_kernel
        draw = drawer(mask_spec, samplers.bernoulli(1 - p))
        scale = 0.0 if p == 1 else 1 / (1 - p)

        def run(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            mask = torch.empty_like(tensor, dtype=torch.bool)
            draw(mask)
            return (tensor * mask).mul_(scale), mask

        return run

    return alike(call, all_dims(call.specs[0].ndim), local=maker)


def _kept_by_kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return what the kernel returns without training; of no elements its mask has no bools."""
    kept, mask = aten.native_dropout.default(tensor, *args, **kwargs)
    return kept, mask.to(torch.bool)


@decomposition(aten.bernoulli.default)
def bernoulli(p: Tensor, *, generator: Any = None) -> Tensor:
    """Return 1 with the probability that each element names."""
    # Kernels lay values in rows, whatever the order of the input.
    return bernoulli_as(p, p, generator=generator).contiguous()


@decomposition(aten.bernoulli.Tensor)
def bernoulli_as(tensor: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    """Return 1 with probability ``p``, in the dtype of another tensor."""
    refuse_generator(aten.bernoulli.Tensor, generator)
    chance = torch.rand_like(tensor, dtype=torch.float64)
    p = without_terms(p)
    local = _local(p)
    if not ((local >= 0) & (local <= 1)).all():
        raise RuntimeError("expected probabilities p_in >= 0 && p_in <= 1")
    return (chance < p).to(tensor.dtype)


@decomposition(aten.bernoulli_.Tensor)
def bernoulli_in_place(tensor: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    """Write 1 with probability ``p``."""
    return tensor.copy_(bernoulli_as(tensor, p.expand(tensor.shape), generator=generator))


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, Wrapper) else tensor


@decomposition(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Tensor | float, std: Tensor | float = 1, *, generator: Any = None) -> Tensor:
    """Return normal numbers around ``mean``."""
    refuse_generator(aten.normal.Tensor_Tensor, generator)
    if not isinstance(std, Tensor) and std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    mean, std = without_terms(mean), without_terms(std)
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    like = tensors[0] if len(tensors) == 1 else torch.add(*tensors)
    numbers = torch.randn_like(like)
    if isinstance(std, Tensor) and not (_local(std) >= 0).all():
        raise RuntimeError("normal expects all elements of std >= 0.0")
    return numbers * std + mean


def without_terms(value: Any) -> Any:
    """Return a tensor reduced: each term would be rounded by itself."""
    return reduced(value) if isinstance(value, Wrapper) else value


@decomposition(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like(tensor: Tensor, high: Tensor, **kwargs: Any) -> Tensor:
    """Return integers below the value of a tensor of one element."""
    refuse_generator(aten.randint_like.Tensor_generator, kwargs.pop("generator", None))
    return torch.randint_like(tensor, int(high.item()), **kwargs)
