"""Lines of products of matrices."""

from __future__ import annotations

from ..drawing import INTEGERS, Draw, has_dims, is_small
from .producers import producer, words


@producer("products", 3)
def product(d: Draw) -> str:
    m, k, n = d.size(), d.size(), d.size()
    b = d.source.randint(1, 3)
    dtype = d.dtype if d.chance(0.8) else None
    name = d.name()

    def factor() -> str:
        # Kernels of floats multiply by it before or after they add, by the sizes of their parts.
        return d.number("if", finite=dtype not in INTEGERS)

    kind = d.one(
        words(
            "mm linear bmm addmm matmul mv dot outer einsum baddbmm addmv addr tensordot "
            "linear_bias"
        )
    )
    if kind == "mm":
        return f"{name} = {d.input((m, k), dtype)} @ {d.input((k, n), dtype)}"
    if kind == "linear":
        return f"{name} = F.linear({d.input((b, m, k), dtype)}, {d.input((n, k), dtype)})"
    if kind == "linear_bias":
        x, w, v = d.input((m, k), dtype), d.input((n, k), dtype), d.input((n,), dtype)
        return f"{name} = F.linear({x}, {w}, {v})"
    if kind == "bmm":
        return f"{name} = torch.bmm({d.input((b, m, k), dtype)}, {d.input((b, k, n), dtype)})"
    if kind == "baddbmm":
        x, y, z = d.input((b, m, n), dtype), d.input((b, m, k), dtype), d.input((b, k, n), dtype)
        return f"{name} = torch.baddbmm({x}, {y}, {z}, beta={factor()}, alpha={factor()})"
    if kind == "addmm":
        x, y, z = d.input((m, n), dtype), d.input((m, k), dtype), d.input((k, n), dtype)
        if d.chance(0.3):
            return f"{x}.addmm_({y}, {z}, alpha={factor()})"
        return f"{name} = torch.addmm({x}, {y}, {z}, beta={factor()}, alpha={factor()})"
    if kind == "addmv":
        x, y, z = d.input((m,), dtype), d.input((m, k), dtype), d.input((k,), dtype)
        return f"{name} = torch.addmv({x}, {y}, {z}, alpha={factor()})"
    if kind == "addr":
        x, y, z = d.input((m, n), dtype), d.input((m,), dtype), d.input((n,), dtype)
        return f"{name} = torch.addr({x}, {y}, {z}, alpha={factor()})"
    if kind == "mv":
        return f"{name} = {d.input((m, k), dtype)} @ {d.input((k,), dtype)}"
    if kind == "dot":
        return f"{name} = torch.dot({d.input((k,), dtype)}, {d.input((k,), dtype)})"
    if kind == "outer":
        return f"{name} = torch.outer({d.input((m,), dtype)}, {d.input((n,), dtype)})"
    if kind == "einsum":
        x, y = d.input((b, m, k), dtype), d.input((b, n, k), dtype)
        return f"{name} = torch.einsum('bmk,bnk->{d.one(['bmn', 'mn', 'nbm', 'bn'])}', {x}, {y})"
    if kind == "tensordot":
        return (
            f"{name} = torch.tensordot({d.input((b, m, k), dtype)}, {d.input((m, k, n), dtype)}, 2)"
        )
    x = d.tensor(has_dims(2, 3), is_small)
    return f"{name} = {x} @ {x}.transpose(-1, -2)"


@producer("autocast", 1)
def autocast(d: Draw) -> str:
    m, k, n = d.size(), d.size(), d.size()
    x, w = d.input((m, k), "float32"), d.input((n, k), "float32")
    text = d.one(
        [
            f"F.linear({x}, {w})",
            f"{x} @ {w}.t()",
            f"F.layer_norm({x}, ({k},))",
            f"F.softmax({x}, 1)",
            f"F.mse_loss({x} @ {w}.t(), torch.zeros_like({x} @ {w}.t()))",
            f"F.cross_entropy({x} @ {w}.t(), ({x} @ {w}.t()).argmax(1))",
            # Without terms that cancel: noise does not come to what is rounded within a line.
            f"({x} @ {w}.t()).abs().sum() + {x}.pow({d.number()}).mean()",
        ]
    )
    # Its cache holds a lock of the process while it casts, which may wait for other ranks here.
    how = "'cpu', torch.bfloat16, cache_enabled=False"
    return f"with torch.autocast({how}): {d.name()} = {text}"
