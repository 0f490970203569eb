"""Convolutions, pools, resampling and padding: values and gradients for all placements."""

# pyright: reportUnknownLambdaType=false
# One line per operator.

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Shard

from ..rank_meshes import assert_holds, run_on_mesh, scattered
from .op_cases import Case, check_on

IMAGE, VOLUME, SIGNAL = (3, 2, 6, 5), (3, 2, 4, 4, 4), (5, 3, 7)


def _unpooled(a: Tensor) -> Tensor:
    values, indices = F.max_pool2d(a, 2, return_indices=True)
    return F.max_unpool2d(values, indices, [2, 2], output_size=a.shape[2:])


def _fractional(a: Tensor, samples: Tensor) -> Tensor:
    samples = (samples.detach() / 10).clamp(max=0.9)
    return torch.nn.functional.fractional_max_pool2d(
        a, 2, output_size=(3, 2), _random_samples=samples
    )


def _grid(a: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(a, grid / 4 - 1, align_corners=False, padding_mode="border")


CONVOLUTIONS = [
    Case("conv1d", lambda a, w, b: F.conv1d(a, w, b, padding=1), (SIGNAL, (4, 3, 3), (4,))),
    Case("conv2d", lambda a, w: F.conv2d(a, w, stride=2), (IMAGE, (5, 2, 2, 3))),
    Case("conv2d_bias", lambda a, w, b: F.conv2d(a, w, b), (IMAGE, (5, 2, 2, 3), (5,))),
    Case("conv_plain", lambda a, w: F.conv2d(a[0], w, dilation=2), ((1, 3, 6, 5), (2, 3, 2, 2))),
    Case("conv3d", lambda a, w: F.conv3d(a, w), (VOLUME, (3, 2, 2, 2, 2))),
    Case("depthwise", lambda a, w, b: F.conv1d(a, w, b, groups=4), ((2, 4, 5), (4, 1, 2), (4,))),
    Case("grouped", lambda a, w, b: F.conv1d(a, w, b, groups=4), ((2, 8, 5), (12, 2, 2), (12,))),
    Case("grouped_5", lambda a, w: F.conv1d(a, w, groups=5), ((2, 5, 5), (10, 1, 2))),
    Case(
        "transposed",
        lambda a, w, b: F.conv_transpose1d(a, w, b, stride=2, output_padding=1),
        (SIGNAL, (3, 4, 3), (4,)),
    ),
    Case("transposed_2d", lambda a, w: F.conv_transpose2d(a, w), (IMAGE, (2, 5, 2, 2))),
    Case(
        "transposed_groups",
        lambda a, w, b: F.conv_transpose1d(a, w, b, groups=2),
        ((2, 4, 5), (4, 3, 2), (6,)),
    ),
    Case(
        "conv_tbc",
        lambda a, w, b: torch.conv_tbc(a, w, b),
        ((5, 3, 2), (2, 2, 4), (4,)),
        grad=False,
    ),
]

POOLS = [
    Case("max_pool1d", lambda a: F.max_pool1d(a, 2), (SIGNAL,)),
    Case("max_pool2d", lambda a: F.max_pool2d(a, 2, stride=1, padding=1), (IMAGE,)),
    Case("max_pool3d", lambda a: F.max_pool3d(a, 2), (VOLUME,)),
    Case("max_unpool", _unpooled, (IMAGE,)),
    Case("avg_pool1d", lambda a: F.avg_pool1d(a, 3), (SIGNAL,)),
    Case("avg_pool2d", lambda a: F.avg_pool2d(a, 2, ceil_mode=True), (IMAGE,)),
    Case("avg_pool2d_plain", lambda a: F.avg_pool2d(a, 2), ((3, 6, 5),)),
    Case("avg_pool3d", lambda a: F.avg_pool3d(a, 2), (VOLUME,)),
    Case("lp_pool", lambda a: F.lp_pool1d(a, 2.0, 2), (SIGNAL,)),
    Case("adaptive_avg1d", lambda a: F.adaptive_avg_pool1d(a, 3), (SIGNAL,)),
    Case("adaptive_avg2d", lambda a: F.adaptive_avg_pool2d(a, (3, 2)), (IMAGE,)),
    Case("adaptive_avg3d", lambda a: F.adaptive_avg_pool3d(a, 2), (VOLUME,)),
    Case("adaptive_one", lambda a: F.adaptive_avg_pool2d(a, 1), (IMAGE,)),
    Case("adaptive_max2d", lambda a: F.adaptive_max_pool2d(a, (3, 2)), (IMAGE,)),
    Case("adaptive_max3d", lambda a: F.adaptive_max_pool3d(a, 2), (VOLUME,)),
    Case("fractional", _fractional, (IMAGE, (3, 2, 2))),
]

RESAMPLING = [
    Case("nearest1d", lambda a: F.interpolate(a, 9), (SIGNAL,)),
    Case("nearest2d", lambda a: F.interpolate(a, scale_factor=2), (IMAGE,)),
    Case("nearest3d", lambda a: F.interpolate(a, (3, 5, 2), mode="nearest-exact"), (VOLUME,)),
    Case("linear", lambda a: F.interpolate(a, 9, mode="linear"), (SIGNAL,)),
    Case("bilinear", lambda a: F.interpolate(a, (7, 4), mode="bilinear"), (IMAGE,)),
    Case(
        "antialias", lambda a: F.interpolate(a, (3, 4), mode="bilinear", antialias=True), (IMAGE,)
    ),
    Case("bicubic", lambda a: F.interpolate(a, (7, 4), mode="bicubic"), (IMAGE,)),
    Case("trilinear", lambda a: F.interpolate(a, 3, mode="trilinear"), (VOLUME,)),
    Case("area", lambda a: F.interpolate(a, (3, 2), mode="area"), (IMAGE,)),
    Case("grid_sample", _grid, (IMAGE, (3, 4, 2, 2))),
    Case("grid_sample_3d", _grid, (VOLUME, (3, 2, 3, 2, 3))),
    Case("affine_grid", lambda a: F.affine_grid(a, [5, 2, 3, 4], align_corners=True), ((5, 2, 3),)),
]

PADS = [
    Case("reflect1d", lambda a: F.pad(a, (2, 1), mode="reflect"), (SIGNAL,)),
    Case("reflect2d", lambda a: F.pad(a, (2, 1, 0, 3), mode="reflect"), (IMAGE,)),
    Case("reflect3d", lambda a: F.pad(a, (1, 1, 0, 2, 1, 0), mode="reflect"), (VOLUME,)),
    Case("replicate1d", lambda a: F.pad(a, (2, 1), mode="replicate"), (SIGNAL,)),
    Case("replicate2d", lambda a: F.pad(a, (2, 1, 0, 3), mode="replicate"), (IMAGE,)),
    Case("replicate3d", lambda a: F.pad(a, (1, 1, 0, 2, 1, 0), mode="replicate"), (VOLUME,)),
    Case("circular", lambda a: F.pad(a, (2, 1), mode="circular"), (SIGNAL,)),
    Case("pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), ((5, 4, 3, 2),)),
    Case("pixel_unshuffle", lambda a: F.pixel_unshuffle(a, 2), ((5, 1, 4, 2),)),
    Case("channel_shuffle", lambda a: F.channel_shuffle(a.detach(), 2), ((5, 4, 3, 2),)),
    Case("unfold", lambda a: F.unfold(a, 2, padding=1), (IMAGE,)),
    Case("fold", lambda a: F.fold(a, (3, 4), 2), ((5, 8, 6),)),
]

GROUPS = {"convolution": CONVOLUTIONS, "pool": POOLS, "resampling": RESAMPLING, "pad": PADS}


@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_one_axis(cases: list[Case]) -> None:
    check_on((4,), cases, 3)


@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_two_axes(cases: list[Case]) -> None:
    check_on((2, 2), cases[::2], 2)


def test_groups_whose_channels_two_axes_cut() -> None:
    """Neither axis alone cuts the bias, so that its cuts are none that the others can follow."""
    data, weight, bias = torch.randn(9, 3, 1, 9), torch.randn(3, 3, 3, 1, 9), torch.randn(3)

    def body(mesh: DeviceMesh) -> None:
        given = (
            scattered(data, mesh, [Shard(3), Shard(2)]),
            scattered(weight, mesh, [Shard(3), Shard(0)]),
            scattered(bias, mesh, [Shard(0), Shard(0)]),
        )
        expected = F.conv3d(data, weight, bias, groups=3)
        assert_holds(F.conv3d(*given, groups=3), expected, atol=1e-4, rtol=1e-4)

    run_on_mesh((2, 2), body)
