"""Losses of predictions and targets of unlike dtypes, and of no elements, against one device."""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Placement, Replicate, Shard, distribute_tensor

from ..rank_meshes import run_on_mesh

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss"),
    pytest.mark.filterwarnings("ignore:(var|std).*degrees of freedom"),
]

Loss = Callable[..., Any]

LOW, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32

OF_ELEMENTS: dict[str, Loss] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "soft_margin_loss": F.soft_margin_loss,
    "poisson_nll_loss": F.poisson_nll_loss,
    "gaussian_nll_loss": lambda x, y, reduction: F.gaussian_nll_loss(
        x, y, y.detach(), reduction=reduction
    ),
    "kl_div": F.kl_div,
    "hinge_embedding_loss": F.hinge_embedding_loss,
    "multilabel_soft_margin_loss": F.multilabel_soft_margin_loss,
}

OF_SAMPLES: dict[str, Loss] = {
    "nll_loss": F.nll_loss,
    "cross_entropy": F.cross_entropy,
    "multi_margin_loss": lambda x, y, w, reduction: F.multi_margin_loss(
        x, y, weight=w, reduction=reduction
    ),
}


def _fractions(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return values between 0 and 1 that half precision holds."""
    count = torch.Size(shape).numel()
    return (((torch.arange(count) * 7) % 13 + 1) / 16).view(tuple(shape)).to(dtype)


def _outcome(loss: Loss, tensors: Sequence[Any], **options: Any) -> list[Any]:
    """Return a loss and the gradients of all floats, or what the loss raises."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    result = loss(*leaves, **options)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
    return [result.detach(), *grads]


def _compare(loss: Loss, wholes: Sequence[Tensor], mesh: DeviceMesh, **options: Any) -> None:
    """Compare a loss with one device for all placements of predictions and targets."""
    expected: list[Any] | None = None
    with suppress(RuntimeError):
        expected = _outcome(loss, wholes, **options)
    for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        given = [
            distribute_tensor(whole, mesh, [_fitting(p, whole)], src_data_rank=None)
            for whole, p in zip(wholes, (*placements, Replicate()), strict=False)
        ]
        what = f"{[whole.dtype for whole in wholes]} {placements} {options}"
        if expected is None:  # as it is refused on one device
            with pytest.raises(RuntimeError):
                _outcome(loss, given, **options)
            continue
        for ours, theirs in zip(_outcome(loss, given, **options), expected, strict=True):
            _assert_close(ours, theirs, what)


def _fitting(placement: Placement, whole: Tensor) -> Placement:
    cuts_it = isinstance(placement, Shard) and placement.dim < whole.ndim
    return placement if cuts_it else Replicate()


def _assert_close(found: Any, expected: Any, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is None:
        return
    assert (found.dtype, found.to_local().dtype) == (expected.dtype, expected.dtype), what
    whole = found.full_tensor()
    assert whole.shape == expected.shape, what
    torch.testing.assert_close(
        whole.float(),
        expected.float(),
        rtol=2e-2,
        atol=2e-2,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_loss_of_unlike_dtypes_equals_one_device(name: str) -> None:
    loss = OF_ELEMENTS[name]
    pairs = [(LOW, SINGLE), (SINGLE, LOW), (LOW, HALF)]

    def body(mesh: DeviceMesh) -> None:
        for values, target in (*pairs, (LOW, LOW)):
            wholes = [_fractions((5, 3), values), _fractions((5, 3), target)]
            for reduction in ("mean", "sum"):
                _compare(loss, wholes, mesh, reduction=reduction)
            _compare(loss, wholes, mesh, reduction="none")

    run_on_mesh((2,), body)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_loss_with_weights_of_another_dtype_equals_one_device(name: str) -> None:
    loss = OF_SAMPLES[name]

    def body(mesh: DeviceMesh) -> None:
        for values, weight, index in (
            (LOW, SINGLE, torch.int64),
            (LOW, LOW, torch.int64),
            (SINGLE, HALF, torch.int64),
            (SINGLE, SINGLE, torch.uint8),
        ):
            target = (torch.arange(5) % 3).to(index)
            wholes = [_fractions((5, 3), values), target, _fractions((3,), weight)]
            for reduction in ("mean", "sum", "none"):
                _compare(loss, wholes, mesh, reduction=reduction)

    run_on_mesh((2,), body)


def test_loss_of_no_elements_equals_one_device() -> None:
    def body(mesh: DeviceMesh) -> None:
        for shape, dtype in (((0, 3), SINGLE), ((3, 0), LOW)):
            whole = torch.zeros(shape, dtype=dtype)
            for loss in OF_ELEMENTS.values():
                for reduction in ("mean", "sum", "none"):
                    _compare(loss, [whole, whole], mesh, reduction=reduction)
        samples = [torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), torch.ones(3)]
        for loss in OF_SAMPLES.values():
            for reduction in ("mean", "sum", "none"):
                _compare(loss, samples, mesh, reduction=reduction)

    run_on_mesh((2,), body)


STATISTICS: tuple[Loss, ...] = (
    lambda x: x.mean(),
    lambda x: x.mean(0),
    lambda x: x.var(),
    lambda x: x.std(1),
    lambda x: x.nanmean(),
    lambda x: x.prod(),
    lambda x: x.logsumexp(0),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.group_norm(x, 2),
    lambda x: F.group_norm(x, 2, *_affine(x)),
    lambda x: F.interpolate(x, scale_factor=2.0),
    lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
    lambda x: F.interpolate(x, size=(4, 4), mode="bicubic"),
)


def _affine(x: Any) -> list[Any]:
    ones = torch.ones(x.shape[1])
    if type(x) is Tensor:
        return [ones, ones]
    return [distribute_tensor(ones, x.device_mesh, [Replicate()], src_data_rank=None)] * 2


def test_norms_and_images_of_no_elements_equal_one_device() -> None:
    def body(mesh: DeviceMesh) -> None:
        for shape in ((0, 4, 6, 6), (3, 0, 6, 6), (3, 4, 0, 6), (2, 4, 6, 0)):
            whole = torch.zeros(shape)
            for number, run in enumerate(STATISTICS):
                try:
                    expected = _outcome(run, [whole])
                except RuntimeError:
                    continue  # as of images without pixels
                for placement in (Shard(0), Shard(1), Shard(3), Replicate()):
                    given = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                    for ours, theirs in zip(_outcome(run, [given]), expected, strict=True):
                        _assert_close(ours, theirs, f"{number}: {shape} {placement}")

    run_on_mesh((2,), body)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has brought it")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_linear_cross_entropy_equals_one_device(placement: Placement) -> None:
    loss: Any = getattr(F, "linear_cross_entropy", None)
    inputs, weight = torch.arange(24.0).reshape(6, 4) / 8, torch.arange(20.0).reshape(5, 4) / 16
    labels = torch.tensor([0, 4, 2, 2, 1, 3])
    wholes = [inputs.requires_grad_(), weight.requires_grad_()]
    expected = loss(*wholes, labels)
    expected.backward()

    def body(mesh: DeviceMesh) -> None:
        found = [
            distribute_tensor(inputs.detach(), mesh, [placement]).requires_grad_(),
            distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_(),
        ]
        made = loss(*found, distribute_tensor(labels, mesh, [placement]))
        _assert_close(made, expected, "loss")
        made.backward()
        for one, whole in zip(found, wholes, strict=True):
            _assert_close(one.grad, whole.grad, "gradient")

    run_on_mesh((2,), body)
