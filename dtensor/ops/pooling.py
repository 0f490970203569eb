"""Pooling: batches and channels pass through, spatial dims are whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .engine.forms import Form, linear, register_forms
from .engine.joint_failures import agreeing
from .engine.table import meta

aten = torch.ops.aten

POOLS: dict[str, str | Form] = {
    "_adaptive_avg_pool2d": linear("*.. -> *.."),
    "_adaptive_avg_pool2d_backward": linear("*.., *.. -> *.."),
    "_adaptive_avg_pool3d": linear("*... -> *..."),
    "_adaptive_avg_pool3d_backward": linear("*..., *... -> *..."),
    "adaptive_max_pool2d": "*.. -> *.., *..",
    "adaptive_max_pool2d_backward": linear("*.., *.., *.. -> *.."),
    "adaptive_max_pool3d": "*... -> *..., *...",
    "adaptive_max_pool3d_backward": linear("*..., *..., *... -> *..."),
    "avg_pool2d": linear("*.. -> *.."),
    "avg_pool2d_backward": linear("*.., *.. -> *.."),
    "avg_pool3d": linear("*... -> *..."),
    "avg_pool3d_backward": linear("*..., *... -> *..."),
    "fractional_max_pool2d": "*.., *. -> *.., *..",
    "fractional_max_pool2d_backward": linear("*.., *.., *.. -> *.."),
    "fractional_max_pool3d": "*..., *. -> *..., *...",
    "fractional_max_pool3d_backward": linear("*..., *..., *... -> *..."),
    "max_pool2d_with_indices": "*.. -> *.., *..",
    "max_pool2d_with_indices_backward": linear("*.., *.., *.. -> *.."),
    "max_pool3d_with_indices": "*... -> *..., *...",
    "max_pool3d_with_indices_backward": linear("*..., *..., *... -> *..."),
    "max_unpool2d": linear("*.., *.. -> *..", agreeing),
    "max_unpool3d": linear("*..., *... -> *...", agreeing),
}

register_forms(aten, POOLS)


@meta(aten.fractional_max_pool3d_backward.default)
def fractional_max_pool3d_backward_meta(grad: Tensor, source: Tensor, *_: Any) -> Tensor:
    """Return an empty tensor like what was pooled."""
    del grad
    return source.new_empty(source.shape)
