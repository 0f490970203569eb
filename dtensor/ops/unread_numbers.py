"""Numbers that no rule and no maker of local kernels reads: kernels get them with every call.

One plan then serves all their values of one type, so a schedule or a warm-up plans once. Numbers of
pointwise operators are so without an entry here. A number without an entry is part of the key of a
plan, by type and value, which is always right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..tensor.schemas import Op
from .engine.forms import operators

aten = torch.ops.aten

_NAMES: dict[str, str] = {
    "addmm addmm.dtype addbmm baddbmm baddbmm.dtype addmv addr _addmm_activation": "alpha beta",
    "native_layer_norm native_group_norm _fused_rms_norm": "eps",
    "native_batch_norm native_batch_norm_backward": "momentum eps",
    "huber_loss huber_loss_backward": "delta",
    "smooth_l1_loss smooth_l1_loss_backward": "beta",
    "multi_margin_loss multi_margin_loss_backward": "margin",
    "index_add": "alpha",
    "index_fill.int_Scalar scatter.value scatter.value_reduce": "value",
    "full_like new_full": "fill_value",
    "bucketize.Scalar searchsorted.Scalar": "self",
    "isin.Scalar_Tensor": "element",
    "renorm": "maxnorm",
}
"""Names of numbers by the names of functional operators."""


def _found() -> Mapping[Op, frozenset[str]]:
    return {
        op: frozenset(numbers.split())
        for names, numbers in _NAMES.items()
        for op in operators(aten, names)
    }


UNREAD = _found()
