"""Lines of pointwise operators: of tensors, and of tensors and numbers."""

from __future__ import annotations

from torch import Tensor

from ..drawing import Draw, Refused, is_any, is_float
from .producers import producer, words

UNARY = words(
    "abs neg exp sqrt rsqrt sin cos tanh sigmoid relu log log1p expm1 floor ceil round trunc sign "
    "square reciprocal erf isnan isfinite isinf logical_not bitwise_not signbit frac sgn atan "
    "asinh positive sinc deg2rad"
)
ACTIVATIONS = words("gelu silu elu leaky_relu softplus hardtanh hardswish mish logsigmoid selu")
NAN_BY_LANES = words("elu selu hardtanh hardswish logit")
"""Where x is nan, kernels give these another gradient in vectors than in what is left over."""
BINARY = words(
    "add sub mul div maximum minimum atan2 fmod remainder pow floor_divide eq ne lt le gt ge "
    "logical_and logical_or logical_xor hypot fmax fmin copysign xlogy bitwise_and bitwise_or "
    "bitwise_xor true_divide rsub logaddexp nextafter ldexp heaviside float_power gcd lcm"
)
SCALAR = words(
    "add sub mul div remainder fmod pow floor_divide eq ne lt le gt ge true_divide clamp_min "
    "clamp_max bitwise_and bitwise_or float_power xlogy copysign"
)
SYMBOLS = ["+", "-", "*", "/", "//", "%", "**", "<", ">", "==", "!=", ">=", "<="]
IN_PLACE = words(
    "add_ sub_ mul_ div_ remainder_ fmod_ pow_ floor_divide_ eq_ ne_ lt_ le_ gt_ ge_ logical_and_ "
    "logical_or_ logical_xor_ atan2_ hypot_ copysign_ xlogy_ bitwise_and_ bitwise_or_ copy_ "
    "clamp_min_ clamp_max_"
)
IN_PLACE_UNARY = words(
    "abs_ neg_ exp_ sin_ tanh_ sigmoid_ relu_ floor_ ceil_ round_ zero_ square_ logical_not_ "
    "sqrt_ trunc_ sign_ log1p_"
)


@producer("pointwise", 3)
def unary(d: Draw) -> str:
    x = d.tensor(is_any)
    kind = d.one(UNARY)
    if kind == "signbit" and bool((d.values[x].isnan() | (d.values[x] == 0)).any()):
        raise Refused  # nobody says which sign these have
    if kind == "sgn" and d.values[x].is_complex() and bool(d.values[x].isinf().any()):
        raise Refused  # what is infinite in one part has a sign in vectors alone
    return f"{d.name()} = torch.{kind}({x})"


@producer("pointwise", 1)
def activation(d: Draw) -> str:
    x = d.tensor(is_float)
    kind = d.one(ACTIVATIONS)
    # A number or none, by how the elements lie in memory.
    if kind == "gelu" and bool(d.values[x].isinf().any()):
        raise Refused
    if kind in NAN_BY_LANES and _has_nan_gradient(d.values[x]):
        raise Refused
    return f"{d.name()} = F.{kind}({x})"


def _has_nan_gradient(x: Tensor) -> bool:
    return x.requires_grad and bool(x.isnan().any())


@producer("pointwise", 4)
def binary(d: Draw) -> str:
    x = d.tensor(is_any)
    y = d.beside(x)
    if d.chance(0.3):
        x, y = y, x
    if d.chance(0.3):
        return f"{d.name()} = {x} {d.one(SYMBOLS)} {y}"
    kind = d.one(BINARY)
    if kind == "copysign" and bool(d.values[y].isnan().any()):
        raise Refused
    return f"{d.name()} = torch.{kind}({x}, {y})"


@producer("pointwise", 2)
def ternary(d: Draw) -> str:
    x = d.tensor(is_any)
    y, z = d.beside(x), d.beside(x)
    kind = d.one(["addcmul", "addcdiv", "lerp", "where", "clamp", "lerp_number", "madd"])
    if kind == "where":
        return f"{d.name()} = torch.where({x} > {d.number('if')}, {y}, {z})"
    if kind == "lerp_number":
        return f"{d.name()} = torch.lerp({x}, {y}, {d.number('if')})"
    if kind == "madd":
        return f"{d.name()} = torch.add({x}, {y}, alpha={d.number()})"
    if kind in ("addcmul", "addcdiv") and d.chance(0.5):
        return f"{d.name()} = torch.{kind}({x}, {y}, {z}, value={d.number('if')})"
    return f"{d.name()} = torch.{kind}({x}, {y}, {z})"


@producer("scalars", 5)
def scalar(d: Draw) -> str:
    x = d.tensor(is_any)
    s = d.number()
    if d.chance(0.5):
        left, right = (x, s) if d.chance(0.7) else (s, x)
        return f"{d.name()} = {left} {d.one(SYMBOLS)} {right}"
    return f"{d.name()} = torch.{d.one(SCALAR)}({x}, {s})"


@producer("scalars", 3)
def scalar_options(d: Draw) -> str:
    x = d.tensor(is_any)
    y = d.beside(x)
    line = d.one(
        [
            "torch.div({x}, {s}, rounding_mode='floor')",
            "torch.div({x}, {y}, rounding_mode='trunc')",
            "torch.sub({x}, {y}, alpha={s})",
            "torch.rsub({x}, {y}, alpha={s})",
            "torch.rsub({x}, {s})",
            "torch.clamp({x}, {s}, {t})",
            "torch.where({x} > 0, {x}, {s})",
            "torch.full_like({x}, {s})",
            "torch.masked_fill({x}, {x} > 0, {s})",
            "torch.nan_to_num({x}, {s})",
            "F.leaky_relu({x}, {s})",
            "F.hardtanh({x}, {s}, {t})",
            "F.threshold({x}, {s}, {t})",
            "F.softplus({x}, {s})",
            "F.elu({x}, {s})",
            # Beyond that no range is left, and kernels take either end of it.
            "torch.logit({x}, min(0.5, {s}))",
            "torch.special.xlog1py({x}, {s})",
            "torch.isclose({x}, {y}, {s})",
            "{x}.new_full((2, 3), {s})",
        ]
    )
    if any(f".{name}(" in line for name in NAN_BY_LANES) and _has_nan_gradient(d.values[x]):
        raise Refused
    s, t = d.number(), d.number() if "{t}" in line else ""
    return f"{d.name()} = " + line.format(x=x, y=y, s=s, t=t)
