"""Pointwise operators, reductions, scans, norms and losses against one device."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# One line per operator; some have no public names.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Partial, distribute_tensor

from ..rank_meshes import assert_holds, collectives, run_on_mesh, scattered
from .op_cases import Case, check_on, choices_of

aten, prims = torch.ops.aten, torch.ops.prims


def _spread(*shapes: tuple[int, ...]) -> Callable[[], Sequence[Tensor]]:
    """Return what makes tensors whose values all differ, of both signs."""

    def make() -> Sequence[Tensor]:
        return [
            ((torch.arange(torch.Size(s).numel()) * 7) % 31).view(s) * 0.25 - 3.0 - i
            for i, s in enumerate(shapes)
        ]

    return make


def _classes(*shape: int, weight: bool = False) -> Callable[[], Sequence[Tensor]]:
    """Return what makes values of classes, targets of which one is ignored, and a weight."""

    def make() -> Sequence[Tensor]:
        (values,) = _spread(shape)()
        samples = (*shape[:1], *shape[2:])
        target = (torch.arange(torch.Size(samples).numel()) * 3 % shape[1]).view(samples)
        target.view(-1)[1] = -100
        return [values, target, *([torch.arange(1.0, shape[1] + 1)] if weight else [])]

    return make


def _case(
    name: str, run: Callable[..., object], *shapes: tuple[int, ...], grad: bool = True
) -> Case:
    """Return a case on tensors whose values all differ."""
    return Case(name, run, shapes, grad, wholes=_spread(*shapes))


S = (5, 3)

POINTWISE = [
    _case("where", lambda a, b: torch.where(a > 0, a, b), S, S),
    _case("lerp", lambda a, b: torch.lerp(a, b, 0.3) + a.lerp(b, a.sigmoid()), S, (3,)),
    _case("addc", lambda a, b: torch.addcmul(a, a, b) + torch.addcdiv(a, b, b.exp()), S, S),
    _case("copysign", lambda a, b: torch.copysign(a, b) + torch.hypot(a, b) + a.atan2(b), S, S),
    _case("clamp", lambda a, b: a.clamp(-1, 2) + a.clamp(min=b) + a.maximum(b).fmin(b), S, S),
    _case("rounds", lambda a: [a.round(), a.floor(), a.trunc(), a.frac(), a.sgn()], S),
    _case("remainders", lambda a, b: [a % 2, torch.fmod(a, b), a.float_power(2)], S, S),
    _case("activations", lambda a: [F.silu(a), F.mish(a), F.hardswish(a), F.elu(a), F.selu(a)], S),
    _case("activations2", lambda a: [F.softplus(a), F.hardtanh(a), F.leaky_relu(a), F.relu6(a)], S),
    _case("shrinks", lambda a: [F.softshrink(a), F.hardshrink(a), F.logsigmoid(a)], S),
    _case("prelu_glu", lambda a, w: [F.prelu(a, w), F.glu(a, 1)], (5, 4), (4,)),
    _case("xlogy", lambda a, b: [torch.xlogy(a, b.abs()), torch.special.xlog1py(a, b.abs())], S, S),
    _case("masks", lambda a, b: [a.masked_fill(b > 0, 0.0), a.nan_to_num(), a.isnan()], S, S),
    _case(
        "logic",
        lambda a, b: [(a > 0) & (b > 0), a.logical_xor(b), ~(a > b), torch.isin(a, b)],
        S,
        S,
    ),
    _case("bits", lambda a, b: [a.int() & b.int(), a.int() << 1, a.int() ^ 3], S, S, grad=False),
    _case("complex", lambda a, b: [torch.complex(a, b).abs(), torch.polar(a, b).angle()], S, S),
    _case("conj", lambda a, b: (torch.complex(a, b).conj() * torch.complex(b, a)).imag, S, S),
    _case("casts", lambda a: [a.bfloat16().double(), a.long(), a.bool(), a.to(torch.cfloat)], S),
    _case(
        "rsub",
        lambda a, b: [torch.rsub(a, b), 1 - a, aten._add_relu.Tensor(a, b), a // 2],
        S,
        S,
        grad=False,
    ),
]


def _written(a: Tensor, b: Tensor) -> list[Tensor]:
    made = a.clone()
    made.lerp_(b, 0.5).addcmul_(a, b).masked_fill_(b > 0, 1.0).copysign_(b)
    F.hardtanh_(made, -2, 2)
    out = torch.empty_like(a)
    torch.mul(a.detach(), b.detach(), out=out)
    sums = torch.empty_like(a[0])
    torch.sum(b.detach(), 0, out=sums)
    return [made, out, sums]


def _lists(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch._foreach_maximum([a, b], 0.5)
    torch._foreach_copy_(made, [b, a])
    torch._foreach_clamp_min_(made, -1.0)
    torch._foreach_addcdiv_(made, [a, b], [b.exp(), a.exp()], 0.5)
    torch._foreach_sqrt_(torch._foreach_abs(made))
    return [*made, *torch._foreach_norm([a, b]), *torch._foreach_pow([a, b], 2)]


LISTS = [
    _case("written", _written, S, S, grad=False),
    _case("lists", _lists, S, S, grad=False),
]

REDUCTIONS = [
    _case("var", lambda a: [a.var(), a.var(0), a.var(1, correction=0, keepdim=True)], S),
    _case("std", lambda a: [a.std(), a.std(0, correction=2), *torch.std_mean(a, 1)], S),
    _case("var_mean", lambda a: [*torch.var_mean(a, (0, 1), keepdim=True), a.cov()], S),
    _case("nansum", lambda a: [a.nansum(), a.sqrt().nansum(0), a.nanmean(1)], S, grad=False),
    _case("counts", lambda a: [(a > 0).count_nonzero(), a.count_nonzero(1)], S),
    _case("prod", lambda a: [a.prod(), a.prod(0), a.prod(1, keepdim=True)], S, grad=False),
    _case("logsumexp", lambda a: [a.logsumexp(0), a.logsumexp((0, 1), keepdim=True)], S),
    _case("lse_inf", lambda a: a.masked_fill(a > 0, -float("inf")).logsumexp(1), S, grad=False),
    _case("aminmax", lambda a: [*a.aminmax(), *a.aminmax(dim=0, keepdim=True)], S),
    _case("max_dim", lambda a: [*a.max(0), *a.min(1, keepdim=True)], S, grad=False),
    _case("max_dim_grad", lambda a: a.max(1).values + a.max(0).values.sum(), S),
    _case("argmax", lambda a: [a.argmax(), a.argmin(0), a.argmax(1, keepdim=True)], S),
    _case(
        "ties", lambda a: [(a > 0).int().argmax(0), (a > 9).int().argmin(), a.bool().max(1)[0]], S
    ),
    _case(
        "nans",
        lambda a: [a.log().argmax(0), a.log().max().isnan(), a.log().min(1)[1]],
        S,
        grad=False,
    ),
    _case("median", lambda a: [a.median(), a.nanmedian(), *a.median(0), *a.mode(1)], S, grad=False),
    _case("kthvalue", lambda a: [*a.kthvalue(2, 0), *a.nanmedian(1)], S, grad=False),
    _case("norms", lambda a: [a.norm(), a.norm(1, 0), a.norm(3, 1), a.norm(0)], S, grad=False),
    _case("norms2", lambda a: [torch.linalg.vector_norm(a, p, 0) for p in (2, -1, 0.5)], S),
    _case("norm_inf", lambda a: [a.norm(float("inf"), 0), a.norm(float("-inf"))], S),
    _case("dist", lambda a, b: torch.dist(a, b, 3) + F.pairwise_distance(a, b).sum(), S, S),
    _case("renorm", lambda a: a.renorm(2, 0, 1.0), S),
    _case("bools", lambda a: [(a > 0).any(0), (a > -9).all(), a.any(), (a > 0).sum(1)], S),
    _case("trace", lambda a: a.trace(), S),
    _case(
        "powsum",
        lambda a: [*torch._foreach_powsum([a], 3), *torch._foreach_max([a])],
        S,
        grad=False,
    ),
    _case(
        "prims",
        lambda a: [prims.sum(a, [0]), prims.amax(a, [0, 1]), prims.prod(a, [1])],
        S,
        grad=False,
    ),
    _case("hash", lambda a: [torch.hash_tensor(a)], S, grad=False),
]

SCANS = [
    _case("cumsum", lambda a: [a.cumsum(0), a.cumprod(1), a.logcumsumexp(0)], S),
    _case("cummax", lambda a: [*a.cummax(0), *a.cummin(1)], S, grad=False),
    _case(
        "sort", lambda a: [a.sort(0)[0], torch.sort(a, stable=True, dim=1, descending=True)[0]], S
    ),
    _case("argsort", lambda a: [a.argsort(0), a.msort(), *a.topk(2, 0), *a.topk(1)], S, grad=False),
    _case("searched", lambda a, b: torch.searchsorted(a.sort()[0], b), (5,), (4,)),
    _case("searched_rows", lambda a, b: torch.searchsorted(a.sort()[0], b, right=True), S, (5, 2)),
    _case("bucketize", lambda a, b: torch.bucketize(a, b.sort()[0]), S, (4,)),
    _case("quantile", lambda a: [a.quantile(0.3), a.nanquantile(0.5, 0)], S, grad=False),
    _case("histc", lambda a: [a.histc(4), a.histc(5, -2, 2), a.histc(3, 1, 1)], S, grad=False),
    _case("histogram", lambda a: [*torch.histogram(a, 4, density=True)], S, grad=False),
    _case("bincount", lambda a: [a.abs().int().bincount(minlength=3)], (5,), grad=False),
    _case(
        "unique", lambda a: [a.round().unique(), *a.int().unique(return_counts=True)], S, grad=False
    ),
    _case("unique_dim", lambda a: [*(a > 0).unique(dim=0, return_inverse=True)], S, grad=False),
]


def _batch_norm(a: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
    mean, var = m.detach().clone(), v.detach().abs() + 1
    made = F.batch_norm(a, mean, var, w, b, training=True, momentum=0.3)
    return [
        made,
        F.batch_norm(a, mean, var, w, b),
        mean,
        var,
        F.batch_norm(a, None, None, None, None, True),
    ]


C = (4,)

NORMS = [
    _case("softmax", lambda a: [a.softmax(0), a.log_softmax(1), F.softmin(a, 1)], S),
    _case("softmax_0d", lambda a: a.sum().softmax(0), S),
    _case("masked_softmax", lambda a, b: torch._masked_softmax(a, b > 0, 1, 2), S, S),
    _case(
        "safe_softmax",
        lambda a: torch._safe_softmax(a.masked_fill(a > -9, -float("inf")), 0),
        S,
        grad=False,
    ),
    _case("layer_norm", lambda a, w, b: F.layer_norm(a, (4,), w, b), (3, 2, 4), C, C),
    _case("layer_norm2", lambda a, w: F.layer_norm(a, (2, 4), w), (3, 2, 4), (2, 4)),
    _case("layer_norm_all", lambda a: F.layer_norm(a, (5, 3)), S),
    _case("rms_norm", lambda a, w: F.rms_norm(a, (4,), w), (5, 4), C),
    _case("rms_fused", lambda a, w: aten._fused_rms_norm(a, [4], w, 1e-5), (5, 4), C, grad=False),
    _case("group_norm", lambda a, w, b: F.group_norm(a, 2, w, b), (5, 4, 3), C, C),
    _case("group_norm_1d", lambda a: F.group_norm(a, 4), (5, 8)),
    _case("batch_norm", _batch_norm, (5, 4, 2), C, C, C, C),
    _case("instance_norm", lambda a, w: F.instance_norm(a, weight=w), (3, 4, 5), C),
    _case("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (5, 4), (5, 1)),
    _case("weight_norm_last", lambda v, g: torch._weight_norm(v, g, 1), (5, 4), (1, 4)),
    _case("normalize", lambda a, b: F.normalize(a, dim=0) + F.cosine_similarity(a, b, 0), S, S),
]


def _of(length: int) -> Any:
    """Return the lengths of five samples; the stubs know tensors only."""
    return (length,) * 5


KINDS = ("none", "mean", "sum")

LOSSES = [
    _case("mse", lambda a, b: [F.mse_loss(a, b, reduction=r) for r in KINDS], S, S),
    _case("huber", lambda a, b: [F.huber_loss(a, b, reduction=r) for r in KINDS], S, S),
    _case("smooth_l1", lambda a, b: [F.smooth_l1_loss(a, b, reduction=r) for r in KINDS], S, S),
    _case("l1", lambda a, b: [F.l1_loss(a, b, reduction=r) for r in KINDS], S, S),
    _case("bce", lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), S, S),
    _case(
        "bce_weight",
        lambda a, b, w: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), w.detach()),
        S, S, (3,),
    ),
    _case(
        "bce_logits",
        lambda a, b, w: [
            F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=w.detach(), reduction=r)
            for r in KINDS
        ],
        S, S, (3,),
    ),
    _case("kl_div", lambda a, b: F.kl_div(a, b.exp(), reduction="batchmean"), S, S),
    _case("soft_margin", lambda a, b: F.soft_margin_loss(a, b.detach().sign()), S, S),
    _case("poisson", lambda a, b: F.poisson_nll_loss(a, b.exp(), full=True), S, S),
    _case("margins", lambda a, b: F.margin_ranking_loss(a, b, b.detach().sign(), 1), S, S),
    _case("hinge", lambda a, b: F.hinge_embedding_loss(a, b.detach().sign()), S, S),
    _case("triplet", lambda a, b, c: F.triplet_margin_loss(a, b, c), S, S, S),
    _case("cosine", lambda a, b, y: F.cosine_embedding_loss(a, b, y.detach().sign()), S, S, (5,)),
]  # fmt: skip


def _nll(r: str) -> Callable[..., Tensor]:
    return lambda a, t, *w: F.cross_entropy(a, t, *[v.detach() for v in w], reduction=r)


CLASSES = [
    *[Case(f"cross_entropy_{r}", _nll(r), ((5, 6), (5,)), wholes=_classes(5, 6)) for r in KINDS],
    *[
        Case(
            f"cross_entropy_weight_{r}",
            _nll(r),
            ((5, 6), (5,), (6,)),
            wholes=_classes(5, 6, weight=True),
        )
        for r in KINDS
    ],
    Case("cross_entropy_2d", _nll("mean"), ((3, 5, 2, 2), (3, 2, 2)), wholes=_classes(3, 5, 2, 2)),
    Case(
        "label_smoothing",
        lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1),
        ((5, 6), (5,)),
        wholes=_classes(5, 6),
    ),
    Case(
        "ctc",
        lambda a, t: F.ctc_loss(a.log_softmax(2), t.view(5, 1).clamp(1), _of(4), _of(1)),
        ((4, 5, 3), (5,)),
        wholes=lambda: [*_spread((4, 5, 3))(), torch.tensor([1, 2, 1, 2, 2])],
    ),
    Case(
        "segment_reduce",
        lambda a, n: torch.segment_reduce(a, "sum", lengths=n, axis=0),
        ((5, 3), (2,)),
        wholes=lambda: [*_spread((5, 3))(), torch.tensor([2, 3])],
    ),
    _case("probabilities", lambda a, b: F.cross_entropy(a, b.softmax(1)), S, S),
    Case(
        "multi_margin",
        lambda a, t: [F.multi_margin_loss(a, t.clamp(0), reduction=r) for r in KINDS],
        ((5, 6), (5,)),
        wholes=_classes(5, 6),
    ),
    Case(
        "multilabel_margin",
        lambda a, t: [
            F.multilabel_margin_loss(a, t.clamp(0).view(5, 1).repeat(1, 3), reduction=r)
            for r in KINDS
        ],
        ((5, 3), (5,)),
        wholes=_classes(5, 3),
    ),
]

GROUPS = {
    "pointwise": POINTWISE,
    "lists": LISTS,
    "reductions": REDUCTIONS,
    "scans": SCANS,
    "norms": NORMS,
    "losses": LOSSES,
    "classes": CLASSES,
}


@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_one_axis(cases: list[Case]) -> None:
    check_on((4,), cases, 4)


@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_two_axes(cases: list[Case]) -> None:
    check_on((2, 2), cases, 1, special=2)


def _rms_norm_backward(
    grad: Tensor, tensor: Tensor, shape: Sequence[int], scale: Tensor, weight: Tensor, mask: Any
) -> tuple[Tensor | None, Tensor | None]:
    assert all(mask)
    assert len(shape) == 1
    shift = (grad * weight * tensor).mean(-1, keepdim=True) * scale**3
    return grad * weight * scale - tensor * shift, (grad * tensor * scale).sum(0)


def test_rms_norm_backward() -> None:
    case = _case("rms_norm_backward", aten._fused_rms_norm_backward, (5, 4), (5, 4), C)
    grad, tensor, weight = wholes = _spread(*case.shapes)()
    leaves = [tensor.clone().requires_grad_(), weight.clone().requires_grad_()]
    F.rms_norm(leaves[0], C, leaves[1], 1e-5).backward(grad)

    def body(mesh: DeviceMesh) -> None:
        for placements in choices_of(case, 2, 12):
            grads, values, weights = map(scattered, wholes, [mesh] * 3, placements)
            scale = (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            made = case.run(grads, values, [4], scale, weights, [True, True])
            for found, leaf in zip(made, leaves, strict=True):
                assert leaf.grad is not None
                assert_holds(found, leaf.grad)

    library = torch.library.Library("aten", "IMPL")  # torch has the kernel for GPUs only
    library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CPU")
    try:
        run_on_mesh((2, 2), body)
    finally:
        library._destroy()


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_pass_through_what_keeps_their_order(op: str) -> None:
    whole = torch.tensor([3.0, -2.0, math.inf, -math.inf, math.nan])
    other = torch.tensor([-math.inf, math.inf, 0.0, 1.0, 2.0])
    turned = {"max": "min", "min": "max"}[op]

    def body(mesh: DeviceMesh) -> None:
        terms: Any = scattered(whole, mesh, [Partial(op)])
        plain = distribute_tensor(other, mesh)
        for call, kept in (
            (lambda t, _: -t, turned),
            (lambda t, o: torch.maximum(t, o), op),
            (lambda t, o: torch.minimum(o, t), op),
            (lambda t, _: (torch.maximum if op == "max" else torch.minimum)(t, t), op),
        ):
            with collectives() as seen:
                made: Any = call(terms, plain)
            assert seen == []
            assert made.placements == (Partial(kept),)
            torch.testing.assert_close(
                made.full_tensor(), call(whole, other), equal_nan=True, rtol=0, atol=0
            )
        # Sums would make not-a-number of infinities, and the least integer has no opposite.
        torch.testing.assert_close((terms + plain).full_tensor(), whole + other, equal_nan=True)
        numbers: Any = scattered(torch.tensor([1, 5]), mesh, [Partial(op)])
        assert (-numbers).full_tensor().tolist() == [-1, -5]
        assert not any(p.is_partial() for p in (-numbers).placements)

    run_on_mesh((2,), body)
