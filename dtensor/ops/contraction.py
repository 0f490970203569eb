"""Products of matrices and vectors, and distances: a contracted factor leaves a Partial sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .engine.dims import all_dims, broadcast_dims
from .engine.factors import Dim, Dims, Factors
from .engine.forms import Form, register_forms
from .engine.local_kernels import lacks_elements, zeros_if_empty, zeros_of_nothing
from .engine.table import LocalCall, OpCall, Rule, in_any_order, meta, rule

aten = torch.ops.aten

_EITHER = ("0", "1")
_WITH_ADDEND = ("01", "02")


@in_any_order
def _columns_inside(local: LocalCall) -> Callable[..., Any] | None:
    """Return what runs a product whose second matrix must have its columns in order."""
    empty = zeros_of_nothing(local)
    if empty is not None:
        return empty
    op = local.call.op

    def run(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if right.is_cuda and right.stride(0) != 1:
            right = right.t().contiguous().t()
        return op(left.contiguous(), right, *args, **kwargs)

    return run


@meta(aten._scaled_mm.default)
def scaled_product(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the shape of a product whose second matrix may lie in any order in memory."""
    return aten._scaled_mm.default(left, right.t().contiguous().t(), *args, **kwargs)


def _addend_in_full(local: LocalCall) -> Callable[..., Any] | None:
    """Return what brings an addend to its full shape where nothing is multiplied.

    ``addmv`` would return it as small as it came.
    """
    empty = zeros_if_empty(local)
    if empty is not None or not lacks_elements(local):
        return empty
    shape, op, whole = local.output_shape, local.op, _in_whole_numbers(local)

    def run(addend: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return op(addend.expand(shape), *args, **whole(kwargs))

    return run


@in_any_order
def _with_addend(local: LocalCall) -> Callable[..., Any] | None:
    """Return what adds to a product where nothing is multiplied on this rank."""
    empty = zeros_if_empty(local)
    if empty is not None or not lacks_elements(local):
        return empty
    op, whole = local.op, _in_whole_numbers(local)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return op(*args, **whole(kwargs))

    return run


def _in_whole_numbers(local: LocalCall) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what rounds ``alpha`` and ``beta`` as products of integers do.

    Kernels refuse fractions where they multiply nothing, which would stop this rank alone.
    """
    dtype = local.inputs[0].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return lambda kwargs: kwargs
    return lambda kwargs: {
        name: int(value) if type(value) is float else value for name, value in kwargs.items()
    }


CONTRACTIONS: dict[str, str | Form] = {
    "mm": Form("ik, kj -> ij", _EITHER),
    "mm.dtype": Form("ik, kj -> ij", _EITHER),
    "bmm": Form("bik, bkj -> bij", _EITHER),
    "bmm.dtype": Form("bik, bkj -> bij", _EITHER),
    "mv": Form("ik, k -> i", _EITHER),
    "dot": Form("k, k ->", _EITHER),
    "vdot": Form("k, k ->", _EITHER),
    "addmm": Form("+ij, ik, kj -> ij", _WITH_ADDEND, _with_addend),
    "addmm.dtype": Form("+ij, ik, kj -> ij", _WITH_ADDEND, _with_addend),
    "baddbmm": Form("+bij, bik, bkj -> bij", _WITH_ADDEND, _with_addend),
    "baddbmm.dtype": Form("+bij, bik, bkj -> bij", _WITH_ADDEND, _with_addend),
    "addbmm": Form("+ij, bik, bkj -> ij", _WITH_ADDEND, _with_addend),
    "addmv": Form("+i, ik, k -> i", _WITH_ADDEND, _addend_in_full),
    "addr": Form("+ij, i, j -> ij", _WITH_ADDEND, _with_addend),
    "_addmm_activation": "ij, i., .j -> ij",
    "_int_mm": Form("ik, kj -> ij", local=_columns_inside),
    "_scaled_mm": Form("i., .j, i., .j, j, . -> ij", local=_columns_inside),
    "_cdist_forward": "*i., *j. -> *ij",
    "_euclidean_dist": "*i., *j. -> *ij",
    "_cdist_backward": Form("*ij, *i., *j., *ij -> *i.", ("0",)),
    "_pdist_forward": ".. -> .",
    "_pdist_backward": Form("., .., . -> ..", ("0",)),
}

register_forms(aten, CONTRACTIONS)

_GROUPED = {
    (2, 2): "i., .., ., . -> .i.",
    (2, 3): ".., ..., ., . -> ..",
    (3, 2): "..., .., ., . -> ..",
    (3, 3): "bi., b.., ., . -> bi.",
}
"""By numbers of dims; columns are not cut, for kernels want their strides aligned."""


@rule(aten._grouped_mm.default)
def grouped_mm_rule(call: OpCall) -> Rule:
    """Products of groups of rows or columns, which must be whole, or of batches."""
    return Form(_GROUPED[call.specs[0].ndim, call.specs[1].ndim]).rule(call)


@rule(aten.linalg_cross.default)
def cross_rule(call: OpCall) -> Rule:
    """Cross product along one dim, which must be whole."""
    shape = call.output_shape
    dim = Dim(call.arg("dim") % max(len(shape), 1))

    def kept(dims: Dims) -> Dims:
        return tuple(None if d == dim else d for d in dims)

    return Factors(
        call,
        inputs=tuple(kept(broadcast_dims(spec, shape)) for spec in call.specs),
        outputs=(kept(all_dims(len(shape))),),
        linear=(frozenset({0}), frozenset({1})),
        local=zeros_of_nothing,
    )


@rule(aten._trilinear.default)
def trilinear_rule(call: OpCall) -> Rule:
    """Three tensors, dims of size 1 put into each, multiplied and summed over some dims."""
    expands, summed = call.args[3:6], {int(dim) for dim in call.arg("sumdim")}
    ndim = call.specs[0].ndim + len(expands[0])
    inputs: list[Dims] = []
    for spec, added in zip(call.specs, expands, strict=True):
        order = [dim for dim in range(ndim) if dim not in added]
        inputs.append(tuple(Dim(dim) for dim, _ in zip(order, spec.shape, strict=True)))
    return Factors(
        call,
        inputs=tuple(inputs),
        outputs=(tuple(Dim(dim) for dim in range(ndim) if dim not in summed),),
        reduce=dict.fromkeys(summed, "sum"),
        linear=tuple(frozenset({index}) for index in range(3)),
        local=zeros_of_nothing,
    )


@meta(aten.bmm.default)
def bmm_meta(left: Tensor, right: Tensor) -> Tensor:
    """Return the product, which has the second dtype where nothing is multiplied.

    Kernels look at the dtypes when there is something to multiply.
    """
    is_empty = 0 in left.shape or 0 in right.shape
    return aten.bmm.default(left.to(right.dtype) if is_empty else left, right)


@meta(aten.addmm.default)
def addmm_meta(bias: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    """Return the product, where the addend broadcasts to it as it usually does."""
    made = torch.mm(left, right)
    is_usual = bias.dtype == made.dtype and bias.shape in (made.shape, made.shape[1:])
    return made if is_usual else aten.addmm.default(bias, left, right, **kwargs)
