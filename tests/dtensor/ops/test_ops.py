"""Every family of rules: values on every rank against one device, for all placements."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false
# One line per operator; the foreach operators have no public names.

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .op_cases import Case, check_on


def _foreach(*tensors: Tensor) -> list[Tensor]:
    halves = torch._foreach_mul(list(tensors), 0.5)
    torch._foreach_add_(halves, [torch.neg(t) for t in tensors], alpha=2)
    torch._foreach_lerp_(halves, list(tensors), 0.25)
    torch._foreach_addcmul_(halves, list(tensors), list(tensors), 0.1)
    return list(torch._foreach_div(halves, [2.0] * len(halves)))


def _written(a: Tensor, b: Tensor) -> Tensor:
    made = a.clone()
    made.mul_(2).add_(b).sub_(1).copy_(made + b)
    return made.clamp_(min=-3)


CASES = [
    Case("add", lambda a, b: a + b, ((5, 3), (5, 3))),
    Case("broadcast", lambda a, b: a * b - 1, ((5, 3), (3,))),
    Case("broadcast_ones", lambda a, b: torch.sub(a, b, alpha=2), ((5, 1), (1, 3))),
    Case("scalar", lambda a: (2 * a + 1.5) / 3 - 1, ((5, 3),)),
    Case("power", lambda a: a**2, ((4, 2),)),
    Case("divide", lambda a, b: a / (b * b + 1), ((5, 3), (5, 3))),
    Case("compare", lambda a, b: torch.where(a > b, a, b), ((5, 3), (5, 3))),
    Case("unary", lambda a: (a.relu() + a.neg().sigmoid() + a.tanh()).abs().sqrt(), ((6, 2),)),
    Case("gelu", lambda a: F.gelu(a), ((5, 3),)),
    Case("cast", lambda a: a.to(torch.float64) + a.int(), ((5, 3),)),
    Case("sum", lambda a: a.sum(), ((5, 3),)),
    Case("sum_dim", lambda a: a.sum(0), ((5, 3),)),
    Case("sum_keepdim", lambda a: a.sum((-1, 0), keepdim=True), ((5, 3),)),
    Case("mean", lambda a: a.mean(), ((5, 3),)),
    Case("mean_dim", lambda a: a.mean(1, keepdim=True), ((5, 3),)),
    Case("prod", lambda a: a.prod(), ((3, 2),), grad=False),
    Case("amax", lambda a: a.amax(0), ((2, 3),)),
    Case("amin", lambda a: a.amin((0, 1), keepdim=True), ((2, 3),)),
    Case("max", lambda a: a.max() - a.min(), ((1, 3),)),
    Case("max_dim", lambda a: a.max(1).values, ((5, 3),)),
    Case("argmax", lambda a: a.argmax(0), ((5, 3),)),
    Case("any_all", lambda a: (a > 4).any(0) | (a > 0).all(), ((5, 3),)),
    Case("norm", lambda a: torch.linalg.vector_norm(a, dim=0), ((5, 3),)),
    Case("norm_inf", lambda a: a.norm(float("inf")), ((1, 3),)),
    Case("cumsum", lambda a: a.cumsum(0), ((5, 3),)),
    Case("mm", lambda a, b: a @ b, ((5, 4), (4, 3))),
    Case("bmm", lambda a, b: torch.bmm(a, b), ((3, 2, 4), (3, 4, 5))),
    Case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=2), ((3,), (5, 4), (4, 3))),
    Case("linear", lambda a, w, b: F.linear(a, w, b), ((5, 4), (3, 4), (3,))),
    Case("linear_3d", lambda a, w, b: F.linear(a, w, b), ((3, 2, 4), (5, 4), (5,))),
    Case("matmul_3d", lambda a, b: a @ b, ((4, 3, 5), (5, 2))),
    Case("mv_dot", lambda a, b: (a @ b).dot(a @ b), ((5, 4), (4,))),
    Case("transpose", lambda a: a.t() + a.transpose(0, 1), ((5, 3),)),
    Case("permute", lambda a: a.permute(2, 0, 1) * 2, ((4, 3, 2),)),
    Case("squeeze", lambda a: a.unsqueeze(1).squeeze() + a.unsqueeze(-1).squeeze(2), ((5, 3),)),
    Case("view_split", lambda a: a.view(5, 2, 3), ((5, 6),)),
    Case("view_join", lambda a: a.reshape(10, 3), ((5, 2, 3),)),
    Case("view_inner", lambda a: a.reshape(2, 3, 4).reshape(6, 4), ((6, 4),)),
    Case("flatten", lambda a: a.flatten(), ((5, 3),)),
    Case("expand", lambda a: a.unsqueeze(1).expand(5, 4, 3), ((5, 3),)),
    Case("select", lambda a: a[1] + a[:, 2:][1], ((5, 3),)),
    Case("slice", lambda a: a[1:4, ::2], ((5, 3),)),
    Case("split", lambda a: [*a.split(2), *a.unbind(1)], ((5, 3),)),
    Case("cat", lambda a, b: torch.cat([a, b]), ((5, 3), (2, 3))),
    Case("stack", lambda a, b: torch.stack([a, b], 1), ((5, 3), (5, 3))),
    Case("softmax", lambda a: a.softmax(1) + a.log_softmax(0), ((5, 3),)),
    Case("layer_norm", lambda a, w, b: F.layer_norm(a, (4,), w, b), ((5, 2, 4), (4,), (4,))),
    Case("like", lambda a: torch.zeros_like(a) + a.new_ones(5, 3) + a.new_full((3,), 2), ((5, 3),)),
    Case("in_place", _written, ((5, 3), (5, 3))),
    Case("fill", lambda a: a.clone().fill_(3) + a.clone().zero_(), ((5, 3),)),
    Case("foreach", _foreach, ((5, 3), (4,), (2, 2, 2))),
    Case("masked_fill", lambda a, b: a.masked_fill(b > 2, 7.0), ((5, 3), (5, 3))),
]


# A mesh of threads costs more than an operator: every test runs many cases on one.
CHUNKS = [CASES[i::4] for i in range(4)]


@pytest.mark.parametrize("cases", CHUNKS, ids=range(4))
def test_one_axis(cases: list[Case]) -> None:
    check_on((3,), cases, 5)


@pytest.mark.parametrize("cases", CHUNKS, ids=range(4))
def test_two_axes(cases: list[Case]) -> None:
    check_on((2, 2), cases, 2, special=4)
