"""The kinds of lines that programs are made of: pointwise operators, scalars, writes, views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .drawing import (
    DTYPES,
    FLOATS,
    INTEGERS,
    MAX_NUMEL,
    Draw,
    Refused,
    dtype_name,
    has_dims,
    is_any,
    is_float,
    is_integer,
)

Produce = Callable[[Draw], str]


@dataclass(frozen=True, slots=True)
class Producer:
    """A kind of line: what draws one, the profile that asks for it, and how often it comes."""

    produce: Produce
    profile: str
    weight: float


PRODUCERS: list[Producer] = []


def producer(profile: str, weight: float = 1.0) -> Callable[[Produce], Produce]:
    """Register a function that draws a line."""

    def register(produce: Produce) -> Produce:
        PRODUCERS.append(Producer(produce, profile, weight))
        return produce

    return register


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


UNARY = words(
    "abs neg exp sqrt rsqrt sin cos tanh sigmoid relu log log1p expm1 floor ceil round trunc sign "
    "square reciprocal erf isnan isfinite isinf logical_not bitwise_not signbit frac sgn atan "
    "asinh positive sinc deg2rad"
)
ACTIVATIONS = words("gelu silu elu leaky_relu softplus hardtanh hardswish mish logsigmoid selu")
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
    return f"{d.name()} = torch.{d.one(UNARY)}({x})"


@producer("pointwise", 1)
def activation(d: Draw) -> str:
    x = d.tensor(is_float)
    return f"{d.name()} = F.{d.one(ACTIVATIONS)}({x})"


@producer("pointwise", 4)
def binary(d: Draw) -> str:
    x = d.tensor(is_any)
    y = d.beside(x)
    if d.chance(0.3):
        x, y = y, x
    if d.chance(0.3):
        return f"{d.name()} = {x} {d.one(SYMBOLS)} {y}"
    return f"{d.name()} = torch.{d.one(BINARY)}({x}, {y})"


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
            "torch.logit({x}, {s})",
            "torch.special.xlog1py({x}, {s})",
            "torch.isclose({x}, {y}, {s})",
            "{x}.new_full((2, 3), {s})",
        ]
    )
    s, t = d.number(), d.number() if "{t}" in line else ""
    return f"{d.name()} = " + line.format(x=x, y=y, s=s, t=t)


# Writes


def writable(d: Draw, *tests: Callable[[Tensor], bool], distributed: bool = True) -> str:
    """Return a tensor that lines may write."""

    def may_be_written(value: Tensor) -> bool:
        return value.untyped_storage().data_ptr() not in d.sealed

    return d.pick(may_be_written, is_any, *tests, distributed=distributed)


def written(d: Draw, name: str, text: str) -> str:
    """Return a line that writes to a tensor, without its gradient where it is a leaf."""
    value = d.values[name]
    if value.is_leaf and value.requires_grad:
        return f"with torch.no_grad(): {text}"
    return text


@producer("writes", 4)
def write_pointwise(d: Draw) -> str:
    x = writable(d)
    if d.chance(0.3):
        return written(d, x, f"{x}.{d.one(IN_PLACE_UNARY)}()")
    y = d.number() if d.chance(0.5) else d.beside(x)
    return written(d, x, f"{x}.{d.one(IN_PLACE)}({y})")


@producer("writes", 2)
def write_more(d: Draw) -> str:
    x = writable(d)
    y = d.beside(x)
    text = d.one(
        [
            "{x}.addcmul_({y}, {y}, value={s})",
            "{x}.addcdiv_({y}, {y}, value={s})",
            "{x}.lerp_({y}, {s})",
            "{x}.fill_({s})",
            "{x}.clamp_({s}, {s})",
            "{x}.masked_fill_({x} > 0, {s})",
            "{x}.add_({y}, alpha={s})",
            "{x}.sub_({y}, alpha={s})",
            "{x}.copy_({y})",
            "{x} += {y}",
            "{x} *= {s}",
            "{x} //= {s}",
            "{x}.where({x} > 0, {y})",
        ]
    )
    s = d.number() if "{s}" in text else ""
    if "[" in x and "=" in text and "._" not in text and text.split()[1:2] in (["+="], ["*="]):
        raise Refused
    return written(d, x, text.format(x=x, y=y, s=s))


@producer("writes", 3)
def write_index(d: Draw) -> str:
    x = writable(d, has_dims(1, 2, 3))
    index = index_text(d, d.values[x])
    region = _indexed(d.values[x], index)
    if d.chance(0.5):
        return written(d, x, f"{x}[{index}] = {d.number()}")
    dtype = dtype_name(d.values[x]) if d.chance(0.8) else None
    y = d.input(tuple(region.shape), dtype) if d.chance(0.6) else d.input((), dtype)
    return written(d, x, f"{x}[{index}] = {y}")


@producer("data", 3)
def write_data(d: Draw) -> str:
    x = writable(d)
    kind = d.weighted({"number": 3, "tensor": 2, "set": 2, "view": 2, "read": 1})
    if kind == "read":
        return f"{d.name()} = {x}.data"
    if kind == "view" and d.values[x].ndim:
        return f"{x}.data[{index_text(d, d.values[x])}] = {d.number()}"
    if kind == "set":
        value = d.values[x]
        if "[" in x or (value.requires_grad and not value.is_leaf):
            raise Refused
        y = d.input(tuple(value.shape), dtype_name(value), grad=False, strides="rows")
        return f"{x}.data = {y}.clone()"
    y = d.number() if kind == "number" else d.beside(x)
    return f"{x}.data.{d.one(['add_', 'mul_', 'copy_', 'sub_'])}({y})"


# Views


def index_text(d: Draw, value: Tensor) -> str:
    """Return an index of ints, slices, None and ... as text."""
    parts: list[str] = []
    for size in value.shape:
        if d.chance(0.3):
            parts.append(":")
            continue
        if size and d.chance(0.35):
            parts.append(str(d.source.randrange(-size, size)))
            continue
        start = d.source.randint(0, size)
        stop = d.source.randint(start, size)
        step = d.one(["", "", "", ":2"])
        parts.append(f"{start or ''}:{stop if d.chance(0.8) else ''}{step}")
    if d.chance(0.15):
        parts.insert(d.source.randint(0, len(parts)), "None")
    while parts and parts[-1] == ":":
        parts.pop()
    return ", ".join(parts) if parts else "..."


def _indexed(value: Tensor, index: str) -> Tensor:
    return eval(f"x[{index}]", {"x": value})


@producer("views", 4)
def view_index(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3, 4))
    return f"{d.name()} = {x}[{index_text(d, d.values[x])}]"


@producer("views", 4)
def view_other(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3, 4))
    value = d.values[x]
    dim, other = d.source.randrange(value.ndim), d.source.randrange(value.ndim)
    size = value.shape[dim]
    order = list(range(value.ndim))
    d.source.shuffle(order)
    start = d.source.randint(0, size)
    factors = [f for f in range(1, size + 1) if size % f == 0]
    options = [
        f"transpose({dim}, {other})",
        f"permute({', '.join(map(str, order))})",
        f"unsqueeze({dim})",
        f"squeeze({dim})",
        "squeeze()",
        f"flatten({min(dim, other)}, {max(dim, other)})",
        f"narrow({dim}, {start}, {d.source.randint(0, size - start)})",
        f"unbind({dim})",
        f"split({d.source.randint(1, max(1, size))}, {dim})",
        f"chunk({d.source.randint(1, 3)}, {dim})",
        f"movedim({dim}, {other})",
        f"reshape({_reshaped(d, value)})",
        f"view({_reshaped(d, value)})",
        "contiguous()",
        "t()",
        "mT",
        f"diagonal({d.source.randint(-1, 1)}, {dim}, {other})",
        f"expand({d.source.randint(1, 3)}, {', '.join(['-1'] * value.ndim)})",
        f"unfold({dim}, {d.source.randint(1, max(1, size))}, {d.source.randint(1, 2)})",
        "detach()",
        f"tensor_split({d.source.randint(1, 3)}, {dim})",
        "view_as_real()" if value.dtype.is_complex else "real",
    ]
    if size:
        options.append(f"unflatten({dim}, ({d.one(factors)}, -1))")
        options.append(f"select({dim}, {d.source.randrange(size)})")
    text = d.one(options)
    if text == "view_as_real()":
        return f"{d.name()} = torch.view_as_real({x})"
    return f"{d.name()} = {x}.{text}"


def _reshaped(d: Draw, value: Tensor) -> str:
    sizes = list(value.shape)
    numel = value.numel()
    if d.chance(0.4):
        return "-1"
    for _ in range(2):
        if len(sizes) > 1 and d.chance(0.6):
            at = d.source.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif sizes:
            at = d.source.randrange(len(sizes))
            factors = [f for f in range(1, sizes[at] + 1) if sizes[at] % f == 0]
            if factors:
                factor = d.one(factors)
                sizes[at : at + 1] = [factor, sizes[at] // factor]
    if numel and d.chance(0.3):
        sizes[d.source.randrange(len(sizes))] = -1
    return ", ".join(map(str, sizes))


@producer("views", 1)
def memory(d: Draw) -> str:
    x = d.tensor(is_any)
    kind = d.one(
        ["contiguous()", "clone()", "reshape({s})", "to({t})", "type({t})", "float()", "rewrap", "double()"]
    )
    if kind == "rewrap":
        return f"{d.name()} = rewrap({x})"
    text = kind.format(
        s=", ".join(map(str, d.values[x].shape)) or "()", t=f"torch.{d.one(DTYPES)}"
    )
    return f"{d.name()} = {x}.{text}"


@producer("redistribute", 3)
def redistribute(d: Draw) -> str:
    x = d.pick(is_any)
    if _is_plain(d, x):
        raise Refused
    value = d.values[x]
    target = d.placements(tuple(value.shape), dtype_name(value) if d.chance(0.2) else None)
    if d.chance(0.6):
        return f"{d.name()} = redistribute({x}, {target!r}).clone()"
    return f"{d.name()} = redistribute({x}, {target!r})"


def _is_plain(d: Draw, name: str) -> bool:
    return name in d.plain_names


@producer("redistribute", 1)
def gather(d: Draw) -> str:
    x = d.pick(is_any)
    if _is_plain(d, x):
        raise Refused
    name = d.name()
    d.plain_names.add(name)
    return f"{name} = whole({x})"


# Plain tensors beside DTensors


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
        return written(d, target, f"{target}.{d.one(IN_PLACE)}({p})")
    left, right = (x, p) if d.chance(0.5) else (p, x)
    if d.chance(0.5):
        return f"{d.name()} = {left} {d.one(SYMBOLS)} {right}"
    return f"{d.name()} = torch.{d.one(BINARY)}({left}, {right})"


# Lists of tensors


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
            f"{d.name()} = torch._foreach_norm([{x}, {y}], {s})",
            f"{d.name()} = torch._foreach_{d.one(['sqrt', 'abs', 'neg', 'exp', 'sign'])}([{x}, {y}])",
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


__all__ = ["FLOATS", "INTEGERS", "MAX_NUMEL", "PRODUCERS", "Producer", "is_integer", "torch"]
