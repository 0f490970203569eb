"""Views that are asked for as copies: the view, cloned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tensor.schemas import Op
from .table import DECOMPOSITIONS, Decomposition

aten = torch.ops.aten

_VIEWS = (
    "_reshape_alias.default diagonal.default expand.default permute.default select.int slice.Tensor"
    " split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default"
    " transpose.int unbind.int unfold.default unsqueeze.default view.dtype"
    " view_as_complex.default view_as_real.default narrow.default"
)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return [_copied(item) for item in value]


def _copy_of(view: Op) -> Decomposition:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _copied(view(*args, **kwargs))

    return run


def _register() -> None:
    for text in _VIEWS.split():
        name, overload = text.split(".")
        view = getattr(getattr(aten, name), overload)
        DECOMPOSITIONS[getattr(getattr(aten, f"{name}_copy"), overload)] = _copy_of(view)
    for op in (aten._reshape_copy.default, aten.view_copy.default):  # of any strides
        DECOMPOSITIONS[op] = _copy_of(aten.reshape.default)


_register()
