"""Pointwise operators: every dim of the broadcast result is a factor.

An operator that torch tags as pointwise needs no line here or elsewhere: ``rule_maker`` finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..tensor.schemas import Op, base_name
from ..torch_private import schema_of
from .engine.dims import all_dims, broadcast_dims
from .engine.dtypes import is_inexact
from .engine.factors import FIRST, LINEAR_OPS, Factors
from .engine.forms import operators
from .engine.kernel_dtypes import dtypes_by_kernel
from .engine.table import Decomposition, OpCall, Rule, decomposition, rule

aten = torch.ops.aten

# The powers of bools to bools are bools, and integers without data; scalars that ``ldexp`` takes
# count as tensors there.
dtypes_by_kernel(
    *operators(aten, "ldexp.Tensor pow.Tensor_Scalar _foreach_pow.Scalar _foreach_pow.ScalarList")
)

_ALL_TOGETHER = frozenset({"add", "sub", "_foreach_add", "_foreach_sub", "copy", "_foreach_copy"})
"""Linear in all tensors at once, and not in a constant beside them."""

_FIRST_ONLY = frozenset({"div", "_foreach_div"})
"""Linear in the first tensor, whatever it is divided by."""

_ANY_ONE = frozenset({"mul", "_foreach_mul"})
"""Linear in each tensor alone."""

_LINEAR_IN: dict[str, tuple[frozenset[int], ...]] = {
    "where": (frozenset({1, 2}),),
    "lerp": (frozenset({0, 1}),),
    "_foreach_lerp": (frozenset({0, 1}),),
    "addcmul": (frozenset({0, 1}), frozenset({0, 2})),
    "_foreach_addcmul": (frozenset({0, 1}), frozenset({0, 2})),
    "addcdiv": (frozenset({0, 1}),),
    "_foreach_addcdiv": (frozenset({0, 1}),),
    "rsub": (frozenset({0, 1}),),
    "complex": (frozenset({0, 1}),),
    "_masked_scale": FIRST,
}
"""Sets of tensors that others are linear in together."""

_UNARY_NAMES = (
    "neg positive clone detach alias zero lift_fresh conj_physical _conj _conj_copy _neg_view"
    " _neg_view_copy alias_copy detach_copy lift lift_fresh_copy _foreach_neg _foreach_zero"
    " zeros_like"
)
_UNARY = frozenset(_UNARY_NAMES.split())
"""Linear in their tensor."""

_EXTREMES = {"maximum": "max", "minimum": "min"}
"""Operators by the reduction that they are of two terms."""

_COPIES_NAMES = (
    "clone detach detach_copy alias alias_copy lift lift_fresh lift_fresh_copy _to_copy"
    " convert_element_type"
)
_COPIES = frozenset(_COPIES_NAMES.split())
"""They keep every kind of Partial that the dtype of the result allows."""

_ZEROS = frozenset({"zero", "_foreach_zero", "zeros_like"})
"""Terms that are all 0 are those of 0, however they are reduced."""

_ALL_OPS = ("sum", "avg", "product", "max", "min")

_UNTAGGED = (
    "_add_relu.Scalar _add_relu.Tensor _conj.default _conj_copy.default _masked_scale.default"
    " _neg_view.default _neg_view_copy.default _prelu_kernel.default"
    " _prelu_kernel_backward.default _to_copy.default alias.default alias_copy.default"
    " clone.default complex.default copy.default detach.default detach_copy.default"
    " elu_backward.default fill.Scalar fill.Tensor floor_divide.Scalar floor_divide.default"
    " hardshrink_backward.default hardsigmoid_backward.default hardswish.default"
    " hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default"
    " lift.default lift_fresh.default lift_fresh_copy.default log_sigmoid_backward.default"
    " log_sigmoid_forward.default masked_fill.Scalar masked_fill.Tensor polar.default rsub.Tensor"
    " softplus_backward.default softshrink_backward.default zero.default"
)
"""Operators that torch has no tag for, in every release or in some."""

_PRIMS = (
    "acos acosh add asin asinh atan atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0"
    " bessel_j1 bitwise_and bitwise_or bitwise_xor cbrt ceil clone cos cosh device_put div eq erf"
    " erf_inv erfc erfcx exp expm1 fill floor fmod frexp gcd ge gt isfinite le lgamma log log10"
    " log1p lt mul ndtri ne neg pow remainder round shift_left shift_right_arithmetic sin sinh"
    " spherical_bessel_j0 sqrt sub tan tanh view_of where zeta"
)
"""Names of what torch's own decompositions are made of, for which there are no tags either."""


@rule(*operators(aten, _UNTAGGED), *operators(torch.ops.prims, _PRIMS))
def pointwise_rule(call: OpCall) -> Rule:
    """Return the rule of an operator whose inputs broadcast to its outputs."""
    shape = call.output_shape
    return Factors(
        call,
        inputs=tuple(broadcast_dims(spec, shape) for spec in call.specs),
        outputs=(all_dims(len(shape)),) * len(call.outputs),
        linear=_linear_sets(call),
        linear_ops=_linear_ops(call),
        ordered=_ordered_sets(call),
    )


def _linear_sets(call: OpCall) -> tuple[frozenset[int], ...]:
    """Return sets of tensors that the operator is linear in together.

    Not where a tensor of one element scales those: it may be infinite, or a zero that divides. Only
    its value tells, and of terms that are 0 or of unlike signs it makes not-a-number. A tensor of
    more elements is taken for finite, so that a gradient is reduced once and not for each product.
    """
    divides = base_name(call.op) in (*_FIRST_ONLY, "addcdiv", "_foreach_addcdiv")
    scalars = {
        index
        for index, spec in enumerate(call.specs)
        if spec.shape.numel() == 1 and (divides or is_inexact(spec.dtype))
    }
    return tuple(chosen for chosen in _all_linear_sets(call) if scalars <= chosen)


def _all_linear_sets(call: OpCall) -> tuple[frozenset[int], ...]:
    name, count = base_name(call.op), len(call.specs)
    every = frozenset(range(count))
    if name in _UNARY or name in _COPIES:
        return (every,)
    if name in _ALL_TOGETHER:
        has_constant = count < _num_operands(call)
        casts = name in ("copy", "_foreach_copy") and not _widens(call)
        return () if has_constant or casts else (every,)
    if name in _FIRST_ONLY:
        tensor_first = isinstance(call.args[0], DTensorSpec)
        rounds = call.kwargs.get("rounding_mode") is not None or not _is_inexact(call)
        return FIRST if tensor_first and not rounds else ()
    if name in _ANY_ONE:
        return tuple(frozenset({i}) for i in range(count))
    if name.endswith("_backward") and schema_of(call.op).arguments[0].name.startswith("grad"):
        return FIRST
    return tuple(together for together in _LINEAR_IN.get(name, ()) if together <= every)


def _ordered_sets(call: OpCall) -> tuple[tuple[frozenset[int], str, str], ...]:
    """Return inputs of which extremes stay extremes.

    Not those of a sum: a rank that has nothing holds an infinity, and with the other one beside it
    would make not-a-number of what is a number on one device. Nor those of integers that are
    negated: the least one has no opposite.
    """
    name = base_name(call.op)
    first, second, both = frozenset({0}), frozenset({1}), frozenset({0, 1})
    if name == "neg" and _is_inexact(call):
        return ((first, "max", "min"), (first, "min", "max"))
    if name in _EXTREMES and len(call.specs) == 2:
        own = _EXTREMES[name]
        alone = tuple((one, op, op) for one in (first, second) for op in ("max", "min"))
        return ((both, own, own), *alone)
    return ()


def _linear_ops(call: OpCall) -> tuple[str, ...]:
    name = base_name(call.op)
    if name in _ZEROS:
        return _ALL_OPS
    if name not in _COPIES:
        return LINEAR_OPS
    if _widens(call):
        return _ALL_OPS
    return ("max", "min") if _is_inexact(call) else ()


def _widens(call: OpCall) -> bool:
    """Whether a copy is exact: a sum that is rounded is no sum of rounded terms."""
    first = call.outputs[0]
    source = call.specs[-1].dtype  # of a copy into another tensor, that which is copied
    if first is None or first.dtype == source:
        return first is not None
    inexact = source.is_floating_point or source.is_complex or source == torch.bool
    return _is_inexact(call) and inexact and torch.promote_types(source, first.dtype) == first.dtype


def _is_inexact(call: OpCall) -> bool:
    """Whether the result is of floating point."""
    first = call.outputs[0]
    return first is not None and (first.dtype.is_floating_point or first.dtype.is_complex)


def _num_operands(call: OpCall) -> int:
    return 1 if len(call.args) < 2 else 2


def _with_numbers(op: Op) -> Decomposition:
    def run(tensors: Any, left: Any, right: Any, scalars: Tensor) -> Any:
        return op(tensors, left, right, scalars.tolist())

    return run


for _name in ("_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv", "_foreach_addcdiv_"):
    # Torch's functions for tensors without data refuse numbers that are in one.
    decomposition(*operators(aten, f"{_name}.Tensor"))(
        _with_numbers(operators(aten, f"{_name}.ScalarList")[0])
    )
