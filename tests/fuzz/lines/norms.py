"""Lines of normalisations, softmax and attention."""

from __future__ import annotations

from ..drawing import FLOATS, Draw, Refused
from .producers import producer, words


@producer("norms", 3)
def norm(d: Draw) -> str:
    b, c, n = d.one([0, 1, 2, 3, 4, 5]), d.one([2, 4, 6, 3]), d.size()
    dtype = d.one(FLOATS)
    name = d.name()
    shape = (b, c, n) if d.chance(0.6) else (b, c, n, d.source.randint(1, 3))
    x = d.input(shape, dtype, values="mixed")

    def vector(size: int) -> str:
        return d.input((size,), dtype if d.chance(0.85) else None, values="unit")

    kind = d.one(
        words(
            "layer_norm layer_norm2 group_norm instance_norm batch_norm rms_norm softmax "
            "log_softmax normalize"
        )
    )
    if kind == "layer_norm":
        last = shape[-1]
        affine = f", {vector(last)}, {vector(last)}" if d.chance(0.5) else ""
        return f"{name} = F.layer_norm({x}, ({last},){affine})"
    if kind == "layer_norm2":
        return f"{name} = F.layer_norm({x}, {shape[-2:]})"
    if kind == "group_norm":
        groups = d.one([g for g in range(1, c + 1) if c % g == 0])
        affine = f", {vector(c)}, {vector(c)}" if d.chance(0.5) else ""
        return f"{name} = F.group_norm({x}, {groups}{affine})"
    if kind == "instance_norm":
        affine = f", weight={vector(c)}, bias={vector(c)}" if d.chance(0.4) else ""
        return f"{name} = F.instance_norm({x}{affine})"
    if kind == "batch_norm":
        if len(shape) > 3 and not d.values[x].is_contiguous():
            # The kernel for CPUs takes gradients that lie row by row for such in its own order.
            raise Refused
        if d.chance(0.5):
            m = d.input((c,), dtype, grad=False, written=True)
            v = d.input((c,), dtype, values="unit", grad=False, written=True)
            return f"{name} = F.batch_norm({x}, {m}, {v}, training={d.chance(0.6)})"
        affine = f", weight={vector(c)}, bias={vector(c)}" if d.chance(0.5) else ""
        return f"{name} = F.batch_norm({x}, None, None, training=True{affine})"
    if kind == "rms_norm":
        affine = f", {vector(shape[-1])}" if d.chance(0.5) else ""
        return f"{name} = F.rms_norm({x}, ({shape[-1]},){affine})"
    if kind == "normalize":
        return f"{name} = F.normalize({x}, dim={d.source.randrange(len(shape))})"
    dtype_text = f", dtype=torch.{d.one(FLOATS)}" if d.chance(0.25) else ""
    return f"{name} = F.{kind}({x}, {d.source.randrange(len(shape))}{dtype_text})"


@producer("norms", 2)
def norm_then_linear(d: Draw) -> str:
    dtype = d.one(["float32", "bfloat16", "float16"])
    n, m = d.one([4, 6, 8]), d.one([3, 4, 5])
    x, w = d.input((d.size(), n), dtype, values="mixed"), d.input((m, n), dtype, values="mixed")
    return f"{d.name()} = F.linear(F.{d.one(['layer_norm', 'rms_norm'])}({x}, ({n},)), {w})"


@producer("attention", 2)
def attention(d: Draw) -> str:
    b, h, s, e = d.one([1, 2, 3]), d.one([1, 2, 4]), d.one([1, 2, 3, 4]), d.one([2, 3, 4])
    t = s if d.chance(0.6) else d.one([1, 2, 3])
    dtype = d.one(["float32", "float32", "float64", "bfloat16", "float16"])
    q = d.input((b, h, s, e), dtype, values="mixed")
    k = d.input((b, h, t, e), dtype, values="mixed")
    v = d.input((b, h, t, e), dtype, values="mixed") if d.chance(0.6) else k
    how = d.one(["", "", ", is_causal=True", f", scale={d.one([0.5, 1.0])}"])
    if not how and d.chance(0.3):
        how = f", attn_mask={d.input((s, t), 'bool' if d.chance(0.5) else dtype, grad=False)}"
    return f"{d.name()} = F.scaled_dot_product_attention({q}, {k}, {v}{how})"
