"""Scans and reductions with ``dtype=``, and with ``out=`` of another dtype, against one device."""

# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Partial, Placement, Replicate, Shard

from ..rank_meshes import assert_holds, run_on_mesh, scattered

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex64,
)
"""Those that scans can have as results."""

VALUES = torch.arange(20).view(5, 4) % 7 + 1
"""Whose sums along dim 0 fit into a byte, and whose products do not."""


def _laid_out(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> Any:
    """Return a distributed tensor; NumPy, which ``scattered`` uses, does not have bfloat16."""
    wide = whole.float() if whole.dtype == torch.bfloat16 else whole
    return scattered(wide, mesh, [placement]).to(whole.dtype)


def _assert_equal(found: Any, whole: Tensor, what: str) -> None:
    assert (found.dtype, found.to_local().dtype) == (whole.dtype, whole.dtype), what
    torch.testing.assert_close(found.full_tensor(), whole, msg=lambda text: f"{what}: {text}")


def _listed(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
@pytest.mark.parametrize("source", [torch.float32, torch.int32, torch.uint8, torch.bool])
def test_scan_with_dtype_equals_one_device(
    scan: Callable[..., Tensor], source: torch.dtype
) -> None:
    whole = VALUES.to(source)
    terms: list[Placement] = [] if source == torch.bool else [Partial()]

    def body(mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Shard(1), Replicate(), *terms):
            x = _laid_out(whole, mesh, placement)
            for dtype in (None, *DTYPES):
                found = scan(x, 0, dtype=dtype)
                _assert_equal(found, scan(whole, 0, dtype=dtype), f"{placement} in {dtype}")

    run_on_mesh((3,), body)


def test_scan_in_dtype_without_kernel_is_refused_on_every_rank() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = _laid_out(VALUES[:2].float(), mesh, Shard(0))  # of 2 rows one rank has none
        for scan in (torch.cumsum, torch.cumprod):
            with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
                scan(x, 0, dtype=torch.bool)

    run_on_mesh((3,), body)


@pytest.mark.parametrize("source", [torch.int16, torch.uint8, torch.bfloat16, torch.float16])
def test_extremes_and_differences_keep_their_dtype(source: torch.dtype) -> None:
    whole = VALUES.to(source)
    runs: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: torch.cummax(x, 0),
        lambda x: torch.cummin(x, 0),
        lambda x: torch.diff(x, dim=0),
        lambda x: torch.trapezoid(x, dim=0),
        lambda x: torch.cumulative_trapezoid(x, dim=0),
    )

    def body(mesh: DeviceMesh) -> None:
        x = _laid_out(whole, mesh, Shard(0))
        for index, run in enumerate(runs):
            found, expected = run(x), run(whole)
            for ours, theirs in zip(_listed(found), _listed(expected), strict=True):
                _assert_equal(ours, theirs, f"{index}")

    run_on_mesh((3,), body)


LARGE = 200 + torch.arange(20).view(5, 4) % 7
"""Bytes, whose sums need more."""

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, **out: torch.sum(x, 0, **out),
    "prod": lambda x, **out: torch.prod(x, 0, **out),
    "nansum": lambda x, **out: torch.nansum(x, 0, **out),
    "cumsum": lambda x, **out: torch.cumsum(x, 0, **out),
    "cumprod": lambda x, **out: torch.cumprod(x, 0, **out),
    "mean": lambda x, **out: torch.mean(x, 0, **out),
    "logsumexp": lambda x, **out: torch.logsumexp(x, 0, **out),
    "var": lambda x, **out: torch.var(x, 0, **out),
    "std": lambda x, **out: torch.std(x, 0, **out),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_out_of_another_dtype_is_computed_in_it(name: str) -> None:
    run, of_fractions = REDUCTIONS[name], name in ("mean", "logsumexp", "var", "std")
    sources = (torch.bfloat16, torch.float32) if of_fractions else (torch.uint8, torch.bfloat16)
    results = (torch.float32, torch.float64, torch.bfloat16)
    if name in ("sum", "prod", "cumsum", "cumprod"):
        results = (*results, torch.int64, torch.int16, torch.uint8)

    def body(mesh: DeviceMesh) -> None:
        for source in sources:
            whole = (VALUES if of_fractions else LARGE).to(source)
            for result in results:
                expected = run(whole, out=torch.empty(0, dtype=result))
                for placement in (Shard(0), Shard(1), Replicate()):
                    out = _laid_out(torch.zeros_like(expected), mesh, Replicate())
                    found = run(_laid_out(whole, mesh, placement), out=out)
                    assert found is out
                    assert out.dtype == result
                    low = result == torch.bfloat16
                    # torch rounds the exponentials of logsumexp to the source's dtype besides.
                    error = 1e-2 if low else 1e-3 if name == "logsumexp" else 1e-6
                    wide = torch.float32 if low else result
                    assert_holds(out.to(wide), expected.to(wide), rtol=error, atol=error)

    run_on_mesh((3,), body)
