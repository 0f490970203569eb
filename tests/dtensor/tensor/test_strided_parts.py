"""Parts in memory of any order: what ranks decide by strides is alike, and kernels read them right.

Five rows on four ranks: two, two, one and none. The strides of the last two say little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard

from ..rank_meshes import assert_holds, run_on_mesh, scattered

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning")

Laid = Callable[[Tensor], Tensor]


def _reversed(part: Tensor) -> Tensor:
    """Return a part whose dims lie in memory in the reverse order."""
    order = list(reversed(range(part.ndim)))
    return part.permute(order).contiguous().permute(order)


def _every_third(part: Tensor) -> Tensor:
    """Return a part of which no two elements are neighbours, as ``qkv.unbind(-1)`` gives."""
    return part.unsqueeze(-1).repeat(*[1] * part.ndim, 3)[..., 1]


def _padded(part: Tensor) -> Tensor:
    """Return a part with a gap after each row."""
    return F.pad(part, (0, 2))[..., : part.shape[-1]]


def _row_major_here_only(part: Tensor) -> Tensor:
    """Return a part that lies as the others do only where it has two rows."""
    return _reversed(part) if part.shape[0] > 1 else part.contiguous()


LAID: list[Laid] = [_reversed, _every_third, _padded, _row_major_here_only]
SHAPED = pytest.mark.parametrize("shaped", [True, False])


def _parts(whole: Tensor, mesh: DeviceMesh, laid: Laid, *, shaped: bool) -> Any:
    local = laid(scattered(whole, mesh, [Shard(0)]).to_local())
    given: dict[str, Any] = {"shape": whole.shape} if shaped else {}
    made = DTensor.from_local(local, mesh, [Shard(0)], **given)
    assert local.numel() == 0 or made.to_local().data_ptr() == local.data_ptr()
    return made


@SHAPED
@pytest.mark.parametrize("laid", LAID)
def test_contiguous_is_a_copy_in_contiguous_memory(laid: Laid, shaped: bool) -> None:
    whole = torch.arange(30.0).view(5, 3, 2)
    views: list[Laid] = [
        lambda x: x,
        lambda x: x.transpose(0, 1),
        lambda x: x[..., 1:],
        lambda x: x.detach(),
        torch.detach,
        lambda x: x[1:].detach().detach(),
        lambda x: x.data,
    ]

    def body(mesh: DeviceMesh) -> tuple[Any, ...]:
        for view in views:
            x = _parts(whole, mesh, laid, shaped=shaped)
            copy: Any = view(x).contiguous()
            assert copy.is_contiguous()
            assert copy.to_local().is_contiguous()
            copy.add_(1)
            assert_holds(x, whole)
            assert_holds(copy, view(whole) + 1)
        x = _parts(whole, mesh, laid, shaped=shaped)
        return x.stride(), x.is_contiguous()

    assert len(set(run_on_mesh((4,), body))) == 1


@SHAPED
@pytest.mark.parametrize("laid", LAID)
def test_attention_of_strided_parts(laid: Laid, shaped: bool) -> None:
    wholes = [torch.randn(5, 2, 4, 8) for _ in range(3)]
    leaves = [whole.clone().requires_grad_() for whole in wholes]
    attend: Any = F.scaled_dot_product_attention
    expected: Any = attend(*leaves)
    (expected * expected).sum().backward()

    def body(mesh: DeviceMesh) -> None:
        parts = [_parts(whole, mesh, laid, shaped=shaped) for whole in wholes]
        q, k, v = (part.detach().requires_grad_() for part in parts)
        found = attend(q, k, v)
        assert_holds(found, expected.detach())
        (found * found).sum().backward()
        for ours, one in zip((q, k, v), leaves, strict=True):
            assert one.grad is not None
            assert_holds(ours.grad, one.grad)

    run_on_mesh((4,), body)


@SHAPED
@pytest.mark.parametrize("laid", LAID)
def test_kernels_that_take_contiguous_memory_for_granted(laid: Laid, shaped: bool) -> None:
    rows, images = torch.randn(5, 8), torch.randn(5, 6, 4)
    vectors = [torch.randn(8), torch.randn(6)]
    index, starts = torch.tensor([0, 2, 4, 1]), torch.tensor([0, 2])

    def results(x: Any, image: Any, of_rows: Any, of_groups: Any, ids: Any, at: Any) -> list[Any]:
        return [
            F.group_norm(image, 3, of_groups, of_groups),
            F.layer_norm(x, (8,), of_rows, of_rows),
            F.rms_norm(x, (8,), of_rows),
            F.instance_norm(image),
            F.pdist(x),
            torch.cdist(x, x),
            F.embedding_bag(ids, x, at),
            F.embedding(ids, x),
            F.avg_pool1d(image, 2),
            F.interpolate(image, 8),
            F.log_softmax(x, 1),
            torch.fft.rfft(x).abs(),
            x @ x.t(),
            x.cumsum(0),
        ]

    expected = results(rows, images, vectors[0], vectors[1], index, starts)

    def body(mesh: DeviceMesh) -> None:
        def replica(vector: Tensor, lies: Laid = _every_third) -> Any:
            return DTensor.from_local(lies(vector), mesh, [Replicate()])

        parts = [_parts(whole, mesh, laid, shaped=shaped) for whole in (rows, images)]
        given = [
            *parts,
            *map(replica, vectors),
            *(replica(i, Tensor.clone) for i in (index, starts)),
        ]
        for ours, one in zip(results(*given), expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), one)

    run_on_mesh((4,), body)


@SHAPED
@pytest.mark.parametrize("laid", LAID)
def test_writes_reach_the_memory_that_was_given(laid: Laid, shaped: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        values = torch.arange(30.0).view(5, 6)
        x = _parts(values, mesh, laid, shaped=shaped)
        local, whole = x.to_local(), torch.empty_strided(x.shape, x.stride()).copy_(values)
        for tensor in (x, whole):
            tensor.add_(1)
            tensor.t()[2].mul_(3)
            tensor[1:, ::2].zero_()
            tensor[4].fill_(7)
            tensor[..., 1] -= 2
            tensor.diagonal().fill_(-1)
            tensor.data.clamp_(max=20)
            vars(torch)["_foreach_mul_"]([tensor], 2.0)
            tensor.copy_(tensor.flip(1))
            tensor.cumsum_(0)
            tensor.reshape(-1).sub_(1)  # a view or a copy, by the strides of the whole
        assert_holds(x, whole)
        assert torch.equal(local, x.to_local())

    run_on_mesh((4,), body)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_of_strided_parts(foreach: bool) -> None:
    whole, grads = torch.randn(5, 6), torch.randn(3, 5, 6)

    def trained(parameter: Tensor, gradients: list[Tensor]) -> Tensor:
        leaf = torch.nn.Parameter(parameter)
        optimizer = torch.optim.AdamW([leaf], lr=0.1, foreach=foreach)
        for grad in gradients:
            leaf.grad = grad
            optimizer.step()
        return leaf.detach()

    expected = trained(whole.clone(), list(grads))

    def body(mesh: DeviceMesh) -> None:
        for laid in LAID:
            x = _parts(whole, mesh, laid, shaped=True)
            found = trained(x, [_parts(grad, mesh, _reversed, shaped=True) for grad in grads])
            assert_holds(found, expected)
            assert_holds(x, expected)

    run_on_mesh((4,), body)


def test_gradients_of_strided_parts() -> None:
    """Also those that autograd makes by expanding one number."""

    def body(mesh: DeviceMesh) -> None:
        for laid in LAID:
            whole = torch.randn(5, 6)
            local = laid(scattered(whole, mesh, [Shard(0)]).to_local()).requires_grad_()
            x = DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 6))
            x.sum().backward()
            x.to_local().sum().backward()
            transposed: Any = x.t() * 2
            transposed.full_tensor()[0].sum().backward()
            assert local.grad is not None
            expected = torch.full((5, 6), 2.0)
            expected[:, 0] += 2
            assert_holds(DTensor.from_local(local.grad, mesh, [Shard(0)], shape=(5, 6)), expected)

    run_on_mesh((4,), body)


@pytest.mark.parametrize("placement", [Replicate(), Partial()])
def test_strides_of_replicas_need_not_agree(placement: Any) -> None:
    whole = torch.arange(12.0).view(3, 4)

    def body(mesh: DeviceMesh) -> tuple[Any, ...]:
        local = scattered(whole, mesh, [placement]).to_local()
        given = _reversed(local) if mesh.get_rank() else local
        x: Any = DTensor.from_local(given, mesh, [placement])
        flat, copy = x.view(-1), x.contiguous()
        flat.mul_(2)
        copy.mul_(4)
        assert_holds(x, whole * 2)
        assert_holds(copy, whole * 4)
        assert torch.equal(x.t().reshape(-1).full_tensor(), (whole * 2).t().reshape(-1))
        return x.stride(), x.t().stride(), flat.stride()

    assert len(set(run_on_mesh((2,), body))) == 1


@SHAPED
def test_images_that_lie_channels_last(shaped: bool) -> None:
    images, weight = torch.randn(5, 4, 6, 6), torch.randn(3, 4, 3, 3)
    expected = F.conv2d(images, weight)

    def laid(part: Tensor) -> Tensor:
        return part.contiguous(memory_format=torch.channels_last)

    def body(mesh: DeviceMesh) -> bool:
        x = _parts(images, mesh, laid, shaped=shaped)
        kernel = DTensor.from_local(laid(weight), mesh, [Replicate()])
        found: Any = F.conv2d(x, kernel)
        torch.testing.assert_close(found.full_tensor(), expected, atol=1e-4, rtol=1e-4)
        found.flatten(1).zero_() if found.is_contiguous() else found.zero_()
        assert_holds(found, torch.zeros_like(expected))
        return x.is_contiguous(memory_format=torch.channels_last)

    assert run_on_mesh((4,), body) == [not shaped] * 4
