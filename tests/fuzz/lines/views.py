"""Lines that view, copy and move."""

from __future__ import annotations

from torch import Tensor

from ..drawing import DTYPES, Draw, Refused, dtype_name, has_dims, is_any
from .producers import producer


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


def indexed(value: Tensor, index: str) -> Tensor:
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
        "conj()" if value.dtype.is_complex else "mH",
    ]
    if size:
        options.append(f"unflatten({dim}, ({d.one(factors)}, -1))")
        options.append(f"select({dim}, {d.source.randrange(size)})")
    text = d.one(options)
    if text.startswith("unfold"):  # its elements share memory: no order of writes is told
        d.seal(x)
    if text == "contiguous()":
        d.seal_if_untold(x)
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
        [
            "contiguous()",
            "clone()",
            "reshape({s})",
            "to({t})",
            "type({t})",
            "float()",
            "rewrap",
            "double()",
        ]
    )
    if kind == "contiguous()":
        d.seal_if_untold(x)
    if kind == "rewrap":
        d.note_untold(x)
        if d.values[x].requires_grad:  # autograd knows of no memory that they share
            d.seal(x)
        return f"{d.name()} = rewrap({x})"
    text = kind.format(s=", ".join(map(str, d.values[x].shape)) or "()", t=f"torch.{d.one(DTYPES)}")
    return f"{d.name()} = {x}.{text}"


@producer("redistribute", 3)
def redistribute(d: Draw) -> str:
    x = d.pick(is_any)
    if _is_plain(d, x):
        raise Refused
    value = d.values[x]
    target = d.placements(tuple(value.shape), dtype_name(value) if d.chance(0.2) else None)
    if d.chance(0.6):
        copy = "clone(memory_format=torch.contiguous_format)"  # the ranks have no other order
        return f"{d.name()} = redistribute({x}, {target!r}).{copy}"
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
