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
    if empty is not None:
        return _refusing_numbers(local, empty)
    if 0 not in local.inputs[1].local_shape:
        return None
    shape, op, whole = local.output_shape, local.op, _in_whole_numbers(local)

    def run(addend: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return op(addend.expand(shape), *args, **whole(kwargs))

    return _refusing_numbers(local, run)


@in_any_order
def _with_addend(local: LocalCall) -> Callable[..., Any] | None:
    """Return what adds to a product where nothing is multiplied on this rank."""
    empty = zeros_if_empty(local)
    if empty is not None:
        return _refusing_numbers(local, empty)
    if not lacks_elements(local):
        return None
    op, whole = local.op, _in_whole_numbers(local)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return op(*args, **whole(kwargs))

    return _refusing_numbers(local, run)


def _refusing_numbers(local: LocalCall, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, before which numbers are refused that ranks with elements refuse.

    Integers are multiplied by numbers of their dtype only. This rank has no element to multiply,
    so the kernel looks at the numbers beside stand-ins of one element.
    """
    if not lacks_elements(local) or not _are_integers(local):
        return run
    op, shapes = local.call.op, [[min(size, 1) for size in spec.shape] for spec in local.inputs]

    def refuse_or_run(*args: Any, **kwargs: Any) -> Any:
        ones = [one.new_ones(shape) for one, shape in zip(args, shapes, strict=False)]
        op(*ones, *args[len(ones) :], **kwargs)
        return run(*args, **kwargs)

    return refuse_or_run


def _in_whole_numbers(local: LocalCall) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what rounds ``alpha`` and ``beta`` as products of integers do.

    Kernels refuse fractions where they multiply nothing, which would stop this rank alone.
    """
    if not lacks_elements(local) or not _are_integers(local):
        return lambda kwargs: kwargs
    return lambda kwargs: {
        name: int(value) if type(value) is float else value for name, value in kwargs.items()
    }


def _are_integers(local: LocalCall) -> bool:
    dtype = local.inputs[0].dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


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
    text = _GROUPED[call.specs[0].ndim, call.specs[1].ndim]
    return Form(text, local=_of_aligned_matrices).rule(call)


@in_any_order
def _of_aligned_matrices(local: LocalCall) -> Callable[..., Any] | None:
    """Return what runs grouped products of parts, whose strides may differ from those of wholes."""
    empty = zeros_of_nothing(local)
    if empty is not None:
        return empty
    op = local.call.op

    def run(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return op(_aligned(left), _aligned(right), *args, **kwargs)

    return run


def _aligned(matrix: Tensor) -> Tensor:
    """Return a matrix, or a batch of some, of which rows or columns begin at multiples of 16 bytes.

    A copy has rows with a gap behind them.
    """
    step = 16 // matrix.itemsize
    rows, columns = matrix.shape[-2:]
    of_row, of_column = matrix.stride()[-2:]
    by_rows = of_column == 1 and of_row >= max(1, columns) and of_row % step == 0
    by_columns = of_row == 1 and of_column >= max(1, rows) and of_column % step == 0
    if by_rows or by_columns:
        return matrix
    padded = matrix.new_empty((*matrix.shape[:-1], columns + -columns % step))
    return padded[..., :columns].copy_(matrix)


@meta(aten._grouped_mm.default)
def grouped_mm_meta(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products, which kernels make in float32 and float16, too.

    Torch's function for tensors without data takes bfloat16 only. It is given that, with all rows
    and columns as many times longer as the elements are shorter: what is aligned stays so.
    """
    dtype = left.dtype
    if dtype not in (torch.float32, torch.float16) or right.dtype != dtype:
        return aten._grouped_mm.default(left, right, offs, bias, out_dtype)
    factor = dtype.itemsize // torch.bfloat16.itemsize
    asked = None if out_dtype in (None, dtype) else out_dtype
    scaled = (_scaled_matrix(left, factor), _scaled_matrix(right, factor))
    made = aten._grouped_mm.default(*scaled, offs, bias, asked)
    *batch, rows, columns = made.shape
    row = made.stride(-2) // factor
    shape = (*batch, rows // factor, columns // factor)
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _scaled_matrix(matrix: Tensor, factor: int) -> Tensor:
    """Return an empty bfloat16 matrix, or batch of some, of ``factor`` times rows and columns."""
    sizes, strides = list(matrix.shape), list(matrix.stride())
    for dim in range(max(matrix.ndim - 2, 0), matrix.ndim):
        sizes[dim] *= factor
        strides[dim] *= factor if strides[dim] != 1 else 1
    return torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device="meta")


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
