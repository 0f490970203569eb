"""Linear algebra that needs the ranks to talk."""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

import torch
from torch import Tensor

from ..redistribute import redistribute_local
from ..tensor.wrapper import Wrapper
from .table import decomposition

aten = torch.ops.aten


@decomposition(aten._linalg_check_errors.default)
def check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Raise LinAlgError on every rank where any rank holds a matrix that could not be factored."""
    if isinstance(info, Wrapper):
        spec = info._spec
        if spec.box is None:
            return
        info = redistribute_local(info._local_tensor, spec, spec.replicated())
    aten._linalg_check_errors(info, api_name, is_matrix=is_matrix)
