"""Products, transforms and linear algebra: values and gradients for all placements."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false
# One line per operator.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    strict,
)
from dtckpt.dtensor.ops.contraction import CONTRACTIONS
from dtckpt.dtensor.ops.engine.forms import operator
from dtckpt.dtensor.ops.linalg import BATCHED, DETERMINANTS, REFUSING
from dtckpt.dtensor.ops.padding import PADS
from dtckpt.dtensor.ops.pooling import POOLS
from dtckpt.dtensor.ops.resampling import SAMPLERS, SHUFFLES

from ..rank_meshes import assert_holds, run_on_mesh, scattered
from .op_cases import Case, check_on

aten = torch.ops.aten

SQUARE, BATCH = ((4, 4),), ((5, 3, 3),)


def _numbers(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if not (dtype.is_floating_point or dtype.is_complex):
        return [torch.randint(-5, 6, s, generator=generator, dtype=dtype) for s in shapes]
    return [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


def _of(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    return lambda: _numbers(shapes, dtype)


def _definite(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    """Return a maker of a symmetric positive definite first matrix, with others of any values."""

    def make() -> list[Tensor]:
        first, *others = _numbers(shapes, torch.float32)
        return [first @ first.mT + 3 * torch.eye(first.shape[-1]), *others]

    return make


def _solved(name: str, *shapes: tuple[int, ...], run: Callable[..., object]) -> Case:
    return Case(name, run, shapes, wholes=_definite(*shapes))


PRODUCTS = [
    Case(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5),
        ((1, 5), (3, 2, 4), (3, 4, 5)),
    ),
    Case("addbmm", lambda c, a, b: torch.addbmm(c, a, b, beta=2), ((5,), (3, 2, 4), (3, 4, 5))),
    Case("addmv", lambda c, a, b: torch.addmv(c, a, b, alpha=3), ((1,), (5, 4), (4,))),
    Case("addmv_of_few", torch.addmv, ((), (5, 2), (2,))),
    Case("addr", lambda c, a, b: torch.addr(c, a, b, beta=2), ((5, 1), (5,), (3,))),
    Case("outer", lambda a, b: torch.outer(a, b) + torch.ger(a, b), ((5,), (3,))),
    Case(
        "vdot", lambda a, b: torch.vdot(a, b), ((5,), (5,)), wholes=_of(torch.complex64, (5,), (5,))
    ),
    Case(
        "mm_complex",
        lambda a, b: a @ b,
        ((5, 4), (4, 3)),
        wholes=_of(torch.complex64, (5, 4), (4, 3)),
    ),
    Case(
        "mm_ints",
        lambda a, b: torch.mm(a, b),
        ((5, 4), (4, 3)),
        wholes=_of(torch.int64, (5, 4), (4, 3)),
    ),
    Case(
        "int_mm",
        lambda a, b: torch._int_mm(a, b),
        ((5, 4), (4, 3)),
        wholes=_of(torch.int8, (5, 4), (4, 3)),
    ),
    Case("einsum", lambda a, b: torch.einsum("bij,kj->bki", a, b), ((3, 5, 4), (2, 4))),
    Case("einsum_diagonal", lambda a: torch.einsum("ii->i", a), SQUARE),
    Case("tensordot", lambda a, b: torch.tensordot(a, b, 2), ((5, 3, 2), (3, 2, 4))),
    Case(
        "bilinear",
        lambda a, b, w, c: torch.nn.functional.bilinear(a, b, w, c),
        ((5, 3), (5, 4), (2, 3, 4), (2,)),
    ),
    Case("kron", lambda a, b: torch.kron(a, b), ((3, 2), (2, 3))),
    Case("cross", lambda a, b: torch.linalg.cross(a, b, dim=0), ((3, 5), (3, 1))),
    Case(
        "cdist",
        lambda a, b: torch.cdist(a, b),
        ((5, 3), (4, 3)),
        wholes=_of(torch.float32, (5, 3), (4, 3)),
    ),
    Case(
        "cdist_large",
        lambda a, b: torch.cdist(a, b),
        ((27, 3), (26, 3)),
        wholes=_of(torch.float32, (27, 3), (26, 3)),
    ),
    Case(
        "cdist_batch",
        lambda a, b: torch.cdist(a, b, p=1.5),
        ((2, 5, 3), (1, 4, 3)),
        wholes=_of(torch.float32, (2, 5, 3), (1, 4, 3)),
    ),
    Case("pdist", lambda a: torch.pdist(a), ((5, 3),), wholes=_of(torch.float32, (5, 3))),
    Case(
        "grouped_mm",
        lambda a, b: torch._grouped_mm(a.bfloat16(), b.bfloat16()).float(),
        ((3, 5, 8), (3, 8, 8)),
        grad=False,
    ),
    Case("multi_dot", lambda a, b, c: torch.linalg.multi_dot([a, b, c]), ((5, 3), (3, 4), (4, 2))),
    Case("chain_matmul", lambda a, b: (a @ b).mT @ a, ((5, 3), (3, 4))),
]

FFT = [
    Case("rfft", lambda a: torch.fft.rfft(a), ((5, 6),)),
    Case("fft_dim", lambda a: torch.fft.fft(a, dim=0), ((5, 3),)),
    Case(
        "irfft",
        lambda a: torch.fft.irfft(a, n=7, dim=0),
        ((4, 3),),
        wholes=_of(torch.complex64, (4, 3)),
    ),
    Case(
        "fft2", lambda a: torch.fft.ifft2(a), ((5, 3, 4),), wholes=_of(torch.complex64, (5, 3, 4))
    ),
    Case("hfft", lambda a: torch.fft.hfft(a) + torch.fft.ihfft(a).real.sum(), ((5, 4),)),
]

LINALG = [
    _solved("cholesky", (5, 3, 3), run=lambda a: torch.linalg.cholesky((a + a.mT) / 2)),
    _solved("inv", (5, 3, 3), run=lambda a: torch.linalg.inv(a)),
    _solved("det", (5, 3, 3), run=lambda a: torch.linalg.det(a)),
    _solved("det_of_turned", (5, 3, 3), run=lambda a: torch.linalg.det(a.mT) + a.mT.logdet()),
    _solved("slogdet", (5, 3, 3), run=lambda a: torch.linalg.slogdet(a)[1] + torch.logdet(a)),
    _solved("solve", (5, 3, 3), (5, 3, 2), run=lambda a, b: torch.linalg.solve(a, b)),
    _solved("solve_vector", (3, 3), (5, 3), run=lambda a, b: torch.linalg.solve(a, b, left=False)),
    _solved("solve_columns", (3, 3), (3, 5), run=lambda a, b: torch.linalg.solve(a, b)),
    _solved(
        "solve_triangular",
        (3, 3),
        (3, 5),
        run=lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
    ),
    _solved("cholesky_solve", (2, 3, 3), (2, 3, 4), run=lambda a, b: torch.cholesky_solve(b, a)),
    _solved("cholesky_inverse", (5, 3, 3), run=lambda a: torch.cholesky_inverse(a)),
    _solved("lu", (5, 3, 3), run=lambda a: torch.linalg.lu(a)),
    _solved(
        "lu_solve",
        (2, 3, 3),
        (2, 3, 4),
        run=lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
    ),
    _solved("ldl", (5, 3, 3), run=lambda a: torch.linalg.ldl_factor(a.detach()).LD),
    _solved(
        "ldl_solve",
        (2, 3, 3),
        (2, 3, 4),
        run=lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a.detach()), b.detach()),
    ),
    _solved("qr", (5, 3, 3), run=lambda a: torch.linalg.qr(a)),
    _solved("svdvals", (5, 3, 3), run=lambda a: torch.linalg.svdvals(a[..., :2])),
    _solved("svd", (5, 3, 3), run=lambda a: torch.linalg.svd(a)[1]),
    _solved("pinv", (5, 3, 3), run=lambda a: torch.linalg.pinv(a)),
    _solved("eigh", (5, 3, 3), run=lambda a: torch.linalg.eigh((a + a.mT) / 2)[0]),
    _solved("eigvals", (5, 3, 3), run=lambda a: torch.linalg.eigvals(a)),
    _solved("matrix_exp", (5, 3, 3), run=lambda a: torch.linalg.matrix_exp(a / 10)),
    _solved("lstsq", (5, 3, 3), (5, 3, 2), run=lambda a, b: torch.linalg.lstsq(a, b).solution),
    _solved(
        "householder",
        (5, 3, 3),
        (5, 3),
        run=lambda a, b: torch.linalg.householder_product(a.detach(), b.detach()),
    ),
    _solved("geqrf", (5, 3, 3), run=lambda a: torch.geqrf(a.detach())),
    _solved(
        "ormqr",
        (5, 3, 3),
        (5, 3),
        (5, 3, 4),
        run=lambda a, t, b: torch.ormqr(a.detach(), t.detach(), b),
    ),
    _solved("matrix_power", (5, 3, 3), run=lambda a: torch.linalg.matrix_power(a, 3)),
    _solved("lu_unpack", (5, 3, 3), run=lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a))),
]

GROUPS = {"products": PRODUCTS, "fft": FFT, "linalg": LINALG}


def test_every_form_is_of_an_operator() -> None:
    tables = (CONTRACTIONS, BATCHED, DETERMINANTS, REFUSING, POOLS, SHUFFLES, SAMPLERS, PADS)
    names = {name for table in tables for name in table}
    lacking = {name for name in names if operator(aten, name) is None}
    assert lacking <= {"cholesky"}  # which torch 2.15 has taken away


def test_low_precision_products() -> None:
    left, right = _numbers(((16, 32), (32, 16)), torch.float32)
    a, b = left.to(torch.float8_e4m3fn), right.mT.to(torch.float8_e4m3fn).contiguous().mT
    scales = torch.rand(16, 1) + 1, torch.rand(1, 16) + 1
    expected = torch._scaled_mm(a, b, *scales, out_dtype=torch.float32)

    def body(mesh: DeviceMesh) -> None:
        laid = [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (a, *scales)]
        whole = DTensor.from_local(b, mesh, [Replicate()])
        with strict():
            found = torch._scaled_mm(laid[0], whole, *laid[1:], out_dtype=torch.float32)
        assert isinstance(found, DTensor)
        assert found.placements == (Shard(0),)
        assert_holds(found, expected)

    run_on_mesh((3,), body)


def test_failures_reach_all_ranks() -> None:
    matrices = torch.eye(3).repeat(4, 1, 1)
    matrices[3] = -matrices[3]
    broken = torch.full((4, 3, 3), 1.0)
    broken[0, 0, 0] = float("nan")

    def body(mesh: DeviceMesh) -> None:
        refused, nan = (
            distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (matrices, broken)
        )
        with pytest.raises(RuntimeError, match="positive-definite"):
            torch.linalg.cholesky(refused)
        with pytest.raises(RuntimeError, match=r"positive-definite|another rank"):
            torch.linalg.cholesky_ex(refused, check_errors=True)
        with pytest.raises(RuntimeError, match=r"converge|another rank|NaN"):
            torch.linalg.eigvals(nan)
        assert int(torch.linalg.cholesky_ex(refused).info.sum()) == 1

    run_on_mesh((2,), body)


@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_one_axis(cases: list[Case]) -> None:
    check_on((4,), cases, 4)


@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_two_axes(cases: list[Case]) -> None:
    check_on((2, 2), cases[::2], 2)


GROUPED: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("rows", (12, 8), (3, 8, 16)),
    ("columns", (3, 5, 8), (8, 16)),
    ("depth", (8, 16), (16, 8)),
    ("batch", (3, 5, 8), (3, 8, 16)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "left", "right"), GROUPED)
def test_grouped_products_are_those_of_one_device_in_every_dtype(
    kind: str, left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Torch without data takes bfloat16 only, so that plans for other dtypes raised."""
    wholes = [torch.arange(math.prod(s)).view(s).sin() for s in (left, right)]
    ends = None if kind == "batch" else torch.tensor([2, 8, 16 if kind != "rows" else 12])
    offsets = None if ends is None else ends.int()

    def run(given: list[Tensor]) -> list[Tensor]:
        matrices = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
        made = torch._grouped_mm(*matrices, offs=offsets)
        made.float().square().sum().backward()
        return [made.detach(), *[m.grad for m in matrices if m.grad is not None]]

    expected = run(wholes)

    def body(mesh: DeviceMesh) -> None:
        for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
            given = [
                scattered(whole, mesh, [p]) for whole, p in zip(wholes, placements, strict=True)
            ]
            for one, other in zip(run(given), expected, strict=True):
                assert isinstance(one, DTensor)
                assert one.stride() == other.stride()
                torch.testing.assert_close(one.full_tensor(), other)

    run_on_mesh((2,), body)


def test_grouped_products_of_unaligned_rows_are_refused_on_all_ranks() -> None:
    def body(mesh: DeviceMesh) -> None:
        offsets = torch.tensor([1, 2], dtype=torch.int32)
        for dtype, columns in ((torch.float32, 6), (torch.float16, 12)):
            left = scattered(torch.ones(1, 8), mesh, [Shard(0)]).to(dtype)  # one rank has no row
            right = scattered(torch.ones(2, 8, columns), mesh, [Replicate()]).to(dtype)
            with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
                torch._grouped_mm(left, right, offs=offsets)

    run_on_mesh((2,), body)
