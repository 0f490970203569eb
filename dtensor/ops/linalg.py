"""Dense linear algebra: batches pass through, matrices must be whole.

A matrix that a solver is given on the right may be cut along its columns. Operators that refuse
some values (a matrix that is not positive definite) do so on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..redistribute import redistribute_local
from ..tensor.schemas import base_name
from ..tensor.wrapper import Wrapper
from .engine.forms import Form, operators, register_forms
from .engine.joint_failures import agreeing
from .engine.local_kernels import zeros_of_nothing
from .engine.table import LocalCall, OpCall, Rule, decomposition, meta, rule

aten = torch.ops.aten


def _laid_as_whole(local: LocalCall) -> Callable[..., Any]:
    """Return what factors local matrices that are contiguous exactly if the whole tensor is.

    Torch factors the transposes of contiguous matrices, and the gradients of determinants, which
    see the whole tensor, go by its strides.
    """
    empty = zeros_of_nothing(local)
    if empty is not None:
        return empty
    source, op = local.call.specs[0], local.op
    whole = torch.empty_strided(source.shape, source.stride, device="meta").is_contiguous()

    def run(matrices: Tensor) -> Any:
        if matrices.is_contiguous() != whole:
            matrices = matrices.contiguous() if whole else matrices.mT.contiguous().mT
        return op(matrices)

    return run


BATCHED: dict[str, str] = {
    "_cholesky_solve_helper": "*.j, *.. -> *.j",
    "cholesky_inverse": "*.. -> *..",
    "cholesky_solve": "*.j, *.. -> *.j",
    "geqrf": "*.. -> *.., *.",
    "linalg_cholesky_ex": "*.. -> *.., *",
    "linalg_householder_product": "*.., *. -> *..",
    "linalg_inv_ex": "*.. -> *.., *",
    "linalg_ldl_factor_ex": "*.. -> *.., *., *",
    "linalg_ldl_solve": "*.., *., *.j -> *.j",
    "linalg_lu": "*.. -> *.., *.., *..",
    "linalg_lu_factor_ex": "*.. -> *.., *., *",
    "linalg_matrix_exp": "*.. -> *..",
    "linalg_qr": "*.. -> *.., *..",
    "ormqr": "*.., *., *.. -> *..",
    "triangular_solve": "*.j, *.. -> *.j, *..(j)",
}

register_forms(aten, BATCHED)

DETERMINANTS: dict[str, Form] = {
    "_linalg_det": Form("*.. -> *, *.., *.", local=_laid_as_whole),
    "_linalg_slogdet": Form("*.. -> *, *, *.., *.", local=_laid_as_whole),
}

register_forms(aten, DETERMINANTS)

REFUSING: dict[str, str] = {
    "_linalg_eigh": "*.. -> *., *..",
    "_linalg_eigvals": "*.. -> *.",
    "_linalg_svd": "*.. -> *.., *., *..",
    "cholesky": "*.. -> *..",
    "linalg_eig": "*.. -> *., *..",
    "linalg_pinv.atol_rtol_tensor": "*.., *, * -> *..",
    "lu_unpack": "*.., *. -> *.., *.., *..",
}
"""Operators that refuse some values."""

register_forms(aten, {name: Form(text, local=agreeing) for name, text in REFUSING.items()})


@rule(*operators(aten, "linalg_cholesky_ex linalg_inv_ex linalg_ldl_factor_ex linalg_lu_factor_ex"))
def factored_rule(call: OpCall) -> Rule:
    """A factorization that tells by its last output, or itself if asked, where it failed."""
    local = agreeing if call.kwargs.get("check_errors") else None
    return Form(BATCHED[base_name(call.op)], local=local).rule(call)


@rule(aten.linalg_solve_triangular.default)
def solve_triangular_rule(call: OpCall) -> Rule:
    """A triangular system with the unknown on either side."""
    left = call.kwargs.get("left", True)
    return Form("*.., *.j -> *.j" if left else "*.., *j. -> *j.", ("1",)).rule(call)


@rule(aten.linalg_lu_solve.default)
def lu_solve_rule(call: OpCall) -> Rule:
    """A system that is factored already."""
    left = call.kwargs.get("left", True)
    text = "*.., *., *.j -> *.j" if left else "*.., *., *j. -> *j."
    return Form(text, ("2",)).rule(call)


@rule(aten._linalg_solve_ex.default)
def solve_rule(call: OpCall) -> Rule:
    """A system with a vector or a matrix on the right, and its factorization."""
    matrix, given = call.specs[0].shape, call.specs[1].shape
    is_vector = len(given) == 1 or given == matrix[:-1]
    if is_vector:
        text = "*.., *. -> *., *.., *., *"
    elif call.kwargs.get("left", True):
        text = "*.., *.j -> *.j, *..(j), *.(j), *(j)"
    else:
        text = "*.., *j. -> *j., *..(j), *.(j), *(j)"
    return Form(text, local=agreeing if call.kwargs.get("check_errors") else None).rule(call)


@rule(aten.linalg_lstsq.default)
def least_squares_rule(call: OpCall) -> Rule:
    """Least squares: solutions, residuals, ranks and singular values."""
    matrix, given = call.specs[0].shape, call.specs[1].shape
    is_vector = given == matrix[:-1] or len(given) == 1
    text = "*.., *. -> *., *., *, *." if is_vector else "*.., *.. -> *.., *., *, *."
    return Form(text, local=agreeing).rule(call)


@meta(aten.geqrf.default)
def geqrf_meta(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty factorization."""
    *batch, rows, columns = matrix.shape
    factored = matrix.new_empty(*batch, columns, rows).mT
    return factored, matrix.new_empty(*batch, min(rows, columns))


@meta(aten.linalg_lstsq.default)
def lstsq_meta(
    matrix: Tensor, given: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty results; residuals exist for tall matrices, and not for every driver."""
    del rcond
    own, (rows, columns) = matrix.shape[:-2], matrix.shape[-2:]
    is_vector = given.shape == matrix.shape[:-1] or given.ndim == 1
    right = given.unsqueeze(-1) if is_vector else given
    batch, count = torch.broadcast_shapes(own, right.shape[:-2]), right.shape[-1]
    used = driver or ("gels" if matrix.is_cuda else "gelsy")
    solution = matrix.new_empty(*batch, count, max(rows, columns)).mT[..., :columns, :]
    has_residuals = rows > columns and used != "gelsy"
    has_values = used in ("gelsd", "gelss")
    return (
        solution.squeeze(-1) if is_vector else solution,
        matrix.new_empty((*batch, count) if has_residuals else 0, dtype=matrix.dtype.to_real()),
        matrix.new_empty(own if used != "gels" else 0, dtype=torch.int64),
        matrix.new_empty(
            (*own, min(rows, columns)) if has_values else 0, dtype=matrix.dtype.to_real()
        ),
    )


@meta(aten.linalg_pinv.atol_rtol_tensor)
def pinv_meta(matrix: Tensor, **_: Any) -> Tensor:
    """Return an empty tensor of the transposed shape."""
    return matrix.mT.new_empty(matrix.mT.shape)


@decomposition(aten._linalg_check_errors.default)
def check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Raise LinAlgError on every rank where any rank holds a matrix that could not be factored."""
    if isinstance(info, Wrapper):
        spec = info.spec
        if spec.box is None:
            return
        info = redistribute_local(info.local, spec, spec.replicated())
    aten._linalg_check_errors(info, api_name, is_matrix=is_matrix)
