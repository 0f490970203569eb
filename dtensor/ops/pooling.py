"""Pooling, resampling and padding: batches and channels pass through, spatial dims are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from .engine.agreement import agreeing
from .engine.forms import Form, register_forms, zeros_of_nothing
from .engine.local import with_local_shape
from .engine.table import METAS, LocalCall

aten = torch.ops.aten

_SOURCE = ("0",)


def _to_input_size(local: LocalCall) -> Callable[..., Any]:
    return zeros_of_nothing(local) or with_local_shape(2, "input_size")(local) or local.call.op


def _local_grid(local: LocalCall) -> Callable[..., Any]:
    batch = local.output_shape[0]

    def run(theta: Tensor, size: Any, align_corners: bool) -> Tensor:
        return aten.affine_grid_generator(theta, [batch, *size[1:]], align_corners)

    return zeros_of_nothing(local) or run


def _like_source(grad: Tensor, source: Tensor, *_: Any) -> Tensor:
    del grad
    return source.new_empty(source.shape)


def _linear(text: str) -> Form:
    return Form(text, _SOURCE)


def _moving(text: str) -> Form:
    """Return the form of an operator that moves elements and changes none."""
    return Form(text, _SOURCE, linear_ops=REDUCE_OPS)


POOLS: dict[str, str | Form] = {
    "_adaptive_avg_pool2d": _linear("*.. -> *.."),
    "_adaptive_avg_pool2d_backward": _linear("*.., *.. -> *.."),
    "_adaptive_avg_pool3d": _linear("*... -> *..."),
    "_adaptive_avg_pool3d_backward": _linear("*..., *... -> *..."),
    "adaptive_max_pool2d": "*.. -> *.., *..",
    "adaptive_max_pool2d_backward": _linear("*.., *.., *.. -> *.."),
    "adaptive_max_pool3d": "*... -> *..., *...",
    "adaptive_max_pool3d_backward": _linear("*..., *..., *... -> *..."),
    "avg_pool2d": _linear("*.. -> *.."),
    "avg_pool2d_backward": _linear("*.., *.. -> *.."),
    "avg_pool3d": _linear("*... -> *..."),
    "avg_pool3d_backward": _linear("*..., *... -> *..."),
    "fractional_max_pool2d": "*.., *. -> *.., *..",
    "fractional_max_pool2d_backward": _linear("*.., *.., *.. -> *.."),
    "fractional_max_pool3d": "*..., *. -> *..., *...",
    "fractional_max_pool3d_backward": _linear("*..., *..., *... -> *..."),
    "max_pool2d_with_indices": "*.. -> *.., *..",
    "max_pool2d_with_indices_backward": _linear("*.., *.., *.. -> *.."),
    "max_pool3d_with_indices": "*... -> *..., *...",
    "max_pool3d_with_indices_backward": _linear("*..., *..., *... -> *..."),
    "max_unpool2d": Form("*.., *.. -> *..", _SOURCE, agreeing),
    "max_unpool3d": Form("*..., *... -> *...", _SOURCE, agreeing),
}

SHUFFLES: dict[str, str | Form] = {
    "channel_shuffle": _moving("n_ -> n_"),
    "native_channel_shuffle": _moving("n_ -> n_"),
    "pixel_shuffle": _moving("*... -> *..."),
    "pixel_unshuffle": _moving("*... -> *..."),
    "im2col": _linear("*... -> *.."),
    "col2im": _linear("*.. -> *..."),
}

SAMPLERS: dict[str, str | Form] = {
    "grid_sampler_2d": _linear("nc.., nij. -> ncij"),
    "grid_sampler_2d_backward": _linear("ncij, nc.., nij. -> nc.., nij."),
    "grid_sampler_3d": _linear("nc..., nijk. -> ncijk"),
    "grid_sampler_3d_backward": _linear("ncijk, nc..., nijk. -> nc..., nijk."),
    "affine_grid_generator": Form("n.. -> n_", _SOURCE, _local_grid),
}

_PADDED = {1: "*.", 2: "*..", 3: "*..."}

PADS: dict[str, str | Form] = {
    f"{kind}_pad{ndim}d{suffix}": _linear(
        f"{dims}, {dims} -> {dims}" if suffix else f"{dims} -> {dims}"
    )
    for kind in ("reflection", "replication")
    for ndim, dims in _PADDED.items()
    for suffix in ("", "_backward")
}

UPSAMPLES = (
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_lanczos2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
)

METAS[aten.fractional_max_pool3d_backward.default] = _like_source

for table in (POOLS, SHUFFLES, SAMPLERS, PADS):
    register_forms(aten, table)
register_forms(aten, dict.fromkeys(UPSAMPLES, _linear("nc_ -> nc_")))
register_forms(
    aten,
    {f"{name}_backward": Form("nc_ -> nc_", _SOURCE, _to_input_size) for name in UPSAMPLES},
)
