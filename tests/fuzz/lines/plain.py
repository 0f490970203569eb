"""Lines with plain tensors beside DTensors, and with lists of tensors."""

from __future__ import annotations

from ..drawing import Draw, is_any
from .pointwise import BINARY, IN_PLACE, SYMBOLS
from .producers import producer
from .writes import apart, writable, written

_ALONE = ["sqrt", "abs", "neg", "exp", "sign"]


@producer("plain", 1)
def plain_target(d: Draw) -> str:
    dtype = d.one(["float32", "float32", "float64", "int64", "bfloat16"])
    x = d.input(d.one([(), (1,)]) if d.chance(0.3) else (), dtype, grad=False)
    shape = () if d.chance(0.85) else d.shape()
    p = d.input(shape, dtype if d.chance(0.8) else None, plain=True, grad=False)
    if shape:
        x = d.input(shape, dtype, grad=False)
    s = d.number()
    return d.one(
        [
            f"{p}.add_({x})",
            f"{p}.mul_({x})",
            f"{p} += {x}",
            f"{p}.{d.one(IN_PLACE)}({x})",
            f"{p}.lerp_({x}, {s})",
            f"{p}.addcmul_({x}, {x}, value={s})",
            f"{p}.addcdiv_({x}, {x})",
            f"{p}.copy_({x})",
            f"{p}.clamp_({x})",
            f"{p}.add_({x}, alpha={s})",
            f"torch._foreach_{d.one(['add_', 'mul_', 'sub_', 'div_', 'pow_'])}([{p}, {x}], {s})",
            f"torch._foreach_add_([{p}, {x}], [{x}, {x}], alpha={s})",
            f"torch._foreach_mul_([{p}, {x}], [{x}, {x}])",
            f"torch._foreach_{d.one(['neg_', 'sqrt_', 'zero_', 'abs_'])}([{x}, {p}])",
            f"torch._foreach_lerp_([{p}, {x}], [{x}, {x}], {s})",
            f"torch._foreach_copy_([{p}, {x}], [{x}, {p}])",
            f"torch.add({x}, 1, out={p})",
            f"torch._foreach_addcmul_([{p}], [{x}], [{x}], {s})",
        ]
    )


@producer("plain", 2)
def plain_operand(d: Draw) -> str:
    x = d.tensor(is_any)
    value = d.values[x]
    shape = () if d.chance(0.7) else tuple(value.shape)
    p = d.input(shape, plain=True, grad=d.chance(0.2))
    if d.chance(0.25):
        target = writable(d)
        return written(d, target, f"{target}.{d.one(IN_PLACE)}({apart(d, target, p)})")
    left, right = (x, p) if d.chance(0.5) else (p, x)
    if d.chance(0.5):
        return f"{d.name()} = {left} {d.one(SYMBOLS)} {right}"
    return f"{d.name()} = torch.{d.one(BINARY)}({left}, {right})"


def order(number: str) -> str:
    """Return the order of a norm: for not-a-number kernels return one element as it is."""
    return f"{number} if {number} == {number} else 2"


@producer("foreach", 2)
def foreach(d: Draw) -> str:
    x = d.tensor(is_any)
    y = d.beside(x)
    z = writable(d)
    s, t = d.number(), d.number()
    return d.one(
        [
            f"{d.name()} = torch._foreach_add([{x}, {y}], {s})",
            f"{d.name()} = torch._foreach_mul([{x}, {y}], [{s}, {t}])",
            f"{d.name()} = torch._foreach_div([{x}, {y}], {s})",
            f"{d.name()} = torch._foreach_pow([{x}, {y}], {s})",
            f"{d.name()} = torch._foreach_sub([{x}], [{y}], alpha={s})",
            f"{d.name()} = torch._foreach_norm([{x}, {y}], {order(s)})",
            f"{d.name()} = torch._foreach_{d.one(_ALONE)}([{x}, {y}])",
            f"{d.name()} = torch._foreach_max([{x}, {y}])",
            f"{d.name()} = torch._foreach_maximum([{x}, {y}], {s})",
            f"{d.name()} = torch._foreach_clamp_min([{x}, {y}], {s})",
            f"{d.name()} = torch._foreach_addcmul([{x}], [{y}], [{y}], {s})",
            f"{d.name()} = torch._foreach_lerp([{x}], [{y}], {s})",
            written(d, z, f"torch._foreach_add_([{z}], {s})"),
            written(d, z, f"torch._foreach_mul_([{z}], [{s}])"),
            written(d, z, f"torch._foreach_div_([{z}], [{z}])"),
            written(d, z, f"torch._foreach_zero_([{z}])"),
            written(d, z, f"torch._foreach_addcdiv_([{z}], [{z}], [{z}], {s})"),
        ]
    )
