"""Images resampled and shuffled: batches and channels pass through, spatial dims are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry.placement import REDUCE_OPS
from ..tensor.schemas import Op, argument_of
from .engine.forms import Form, linear, operators, register_forms
from .engine.local_kernels import with_local_shape, zeros_of_nothing
from .engine.table import LocalCall, meta

aten = torch.ops.aten


def _to_input_size(local: LocalCall) -> Callable[..., Any] | None:
    return zeros_of_nothing(local) or with_local_shape("input_size")(local)


def _local_grid(local: LocalCall) -> Callable[..., Any]:
    batch = local.output_shape[0]

    def run(theta: Tensor, size: Any, align_corners: bool) -> Tensor:
        return aten.affine_grid_generator(theta, [batch, *size[1:]], align_corners)

    return zeros_of_nothing(local) or run


def _moving(text: str) -> Form:
    """Return the form of an operator that moves elements and changes none."""
    return Form(text, ("0",), linear_ops=REDUCE_OPS)


SHUFFLES: dict[str, str | Form] = {
    "channel_shuffle": _moving("n_ -> n_"),
    "native_channel_shuffle": _moving("n_ -> n_"),
    "pixel_shuffle": _moving("*... -> *..."),
    "pixel_unshuffle": _moving("*... -> *..."),
    "im2col": linear("*... -> *.."),
    "col2im": linear("*.. -> *..."),
}

SAMPLERS: dict[str, str | Form] = {
    "grid_sampler_2d": linear("nc.., nij. -> ncij"),
    "grid_sampler_2d_backward": linear("ncij, nc.., nij. -> nc.., nij."),
    "grid_sampler_3d": linear("nc..., nijk. -> ncijk"),
    "grid_sampler_3d_backward": linear("ncijk, nc..., nijk. -> nc..., nijk."),
    "affine_grid_generator": linear("n.. -> n_", _local_grid),
}

UPSAMPLES = (
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
    " upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d"
    " upsample_nearest2d upsample_nearest3d upsample_trilinear3d"
)


def _resized(op: Op, size: str) -> Callable[..., Tensor]:
    """Return what makes an empty result of the named size; torch's own fails for no images."""

    def empty(images: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if images.ndim == 0 or images.shape[0] or 0 in images.shape[1:]:
            return op(images, *args, **kwargs)
        sizes = argument_of(op, (images, *args), kwargs, size)
        return images.new_empty(sizes if size == "input_size" else [*images.shape[:2], *sizes])

    return empty


for table in (SHUFFLES, SAMPLERS):
    register_forms(aten, table)

for name in UPSAMPLES.split():
    backward = linear("nc_ -> nc_", _to_input_size)
    register_forms(aten, {name: linear("nc_ -> nc_"), f"{name}_backward": backward})
    for _op in operators(aten, name):
        meta(_op)(_resized(_op, "output_size"))
    for _op in operators(aten, f"{name}_backward"):
        meta(_op)(_resized(_op, "input_size"))
