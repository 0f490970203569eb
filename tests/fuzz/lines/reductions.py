"""Lines of reductions, scans and ``out=``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..drawing import DTYPES, Draw, Refused, dtype_name, has_dims, is_any
from .plain import order
from .producers import producer, words
from .writes import writable, written


def _dims(d: Draw, ndim: int) -> str:
    if d.chance(0.2) or not ndim:
        return ""
    if d.chance(0.25) and ndim > 1:
        first, second = d.source.sample(range(ndim), 2)
        return f", ({first}, {second})"
    return f", {d.source.randrange(-ndim, ndim)}"


def _dtype(d: Draw, share: float) -> str:
    return f", dtype=torch.{d.one(DTYPES)}" if d.chance(share) else ""


@producer("reductions", 4)
def reduction(d: Draw) -> str:
    x = d.tensor(is_any)
    ndim = d.values[x].ndim
    dims = _dims(d, ndim)
    kind = d.one(
        words("sum mean prod amax amin var std logsumexp any all count_nonzero nansum norm")
    )
    keep = ", keepdim=True" if dims and d.chance(0.3) and kind != "count_nonzero" else ""
    if kind in ("sum", "mean", "prod", "nansum"):
        keep += _dtype(d, 0.25)
    if kind in ("var", "std") and d.chance(0.3):
        keep += f", correction={d.number('if')}"
    if kind == "norm":
        along = dims.replace(",", ", dim=", 1)
        return f"{d.name()} = torch.linalg.vector_norm({x}, {order(d.number('if'))}{along}{keep})"
    if kind == "logsumexp" and not dims:
        raise Refused
    if kind == "prod" and "(" not in dims:
        value = d.values[x]
        if _overflows_between(value, dims, keep) or _goes_by_order(value):
            raise Refused
    return f"{d.name()} = torch.{kind}({x}{dims}{keep})"


def _overflows_between(value: Tensor, dims: str, keep: str) -> bool:
    """Whether a product of half precision is infinite on the way and not in the end.

    By the order in which one device multiplies; parts meet in single precision.
    """
    found = eval(f"torch.prod(x{dims}{keep})", {"torch": torch, "x": value})
    if not found.dtype.is_floating_point or found.dtype.itemsize > 2:
        return False
    exact = eval(f"torch.prod(x.double(){dims})", {"x": value, "torch": torch}).view(found.shape)
    ends_finite = exact.abs() <= torch.finfo(found.dtype).max
    return bool((ends_finite & ~found.isfinite()).any())


def _goes_by_order(value: Tensor) -> bool:
    """Whether a product, or its gradient, is another one for another order of the elements.

    As where some of them overflow before the others bring the product down; and gradients divide
    the product by what is not finite, or multiply the others.
    """
    sizes = value.detach().to(torch.complex128).abs()
    if not bool(sizes.isfinite().all()):
        return value.requires_grad
    most = float(sizes.clamp(min=1).log2().sum())
    return most > 100 and bool((sizes < 1).any())


@producer("reductions", 1)
def extreme(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3))
    dim = d.source.randrange(d.values[x].ndim)
    kind = d.one(words("max min argmax argmin median cummax cummin sort topk argsort mode aminmax"))
    if kind == "topk":
        return f"{d.name()} = torch.topk({x}, {d.source.randint(0, 3)}, {dim})"
    if kind == "aminmax":
        return f"{d.name()} = torch.aminmax({x}, dim={dim})"
    whole = d.chance(0.3) and kind in ("max", "min", "argmax", "argmin", "median")
    return f"{d.name()} = torch.{kind}({x}{'' if whole else f', {dim}'})"


@producer("scans", 3)
def scan(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3))
    dim = d.source.randrange(-d.values[x].ndim, d.values[x].ndim)
    kind = d.one(words("cumsum cumprod cumsum logcumsumexp"))
    dtype = _dtype(d, 0.6) if kind != "logcumsumexp" else ""
    if kind != "logcumsumexp" and d.chance(0.15):
        z = writable(d, has_dims(1, 2, 3))
        dim = d.source.randrange(d.values[z].ndim)
        return written(d, z, f"{z}.{kind}_({dim})")
    return f"{d.name()} = torch.{kind}({x}, {dim}{dtype})"


@producer("out", 2)
def into_out(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3))
    value = d.values[x]
    dim = d.source.randrange(value.ndim)
    shape = tuple(value.shape)
    short = (*shape[:dim], *shape[dim + 1 :])
    y = ""
    kind, out_shape, text = d.one(
        [
            ("sum", short, "torch.sum({x}, {dim}, out={o})"),
            ("sum", short, "torch.sum({x}, {dim}, out={o})"),
            ("cumsum", shape, "torch.cumsum({x}, {dim}, out={o})"),
            ("cumprod", shape, "torch.cumprod({x}, {dim}, out={o})"),
            ("mean", short, "torch.mean({x}, {dim}, out={o})"),
            ("prod", short, "torch.prod({x}, {dim}, out={o})"),
            ("amax", short, "torch.amax({x}, {dim}, out={o})"),
            ("argmax", short, "torch.argmax({x}, {dim}, out={o})"),
            ("all", short, "torch.all({x}, {dim}, out={o})"),
            ("add", shape, "torch.add({x}, {y}, out={o})"),
            ("mul", shape, "torch.mul({x}, {y}, out={o})"),
            ("eq", shape, "torch.eq({x}, {y}, out={o})"),
            ("exp", shape, "torch.exp({x}, out={o})"),
            (
                "cat",
                (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]),
                "torch.cat([{x}, {x}], {dim}, out={o})",
            ),
            ("norm", short, "torch.linalg.vector_norm({x}, 2, {dim}, out={o})"),
            ("logsumexp", short, "torch.logsumexp({x}, {dim}, out={o})"),
        ]
    )
    if "{y}" in text:
        y = d.beside(x)
    same = dtype_name(value) if kind not in ("argmax", "eq", "all") else None
    dtype = same if same and d.chance(0.4) else d.one(DTYPES)
    o = d.input(out_shape, dtype, grad=False, written=True)
    return "with torch.no_grad(): " + text.format(x=x, y=y, o=o, dim=dim)
