"""Lines that take elements by indices, and that join tensors."""

from __future__ import annotations

from ..drawing import FLOATS, Draw, Refused, dtype_name, has_dims, is_any
from .producers import producer, words
from .writes import writable, written


@producer("indices", 3)
def indices(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3))
    value = d.values[x]
    shape, dim = tuple(value.shape), d.source.randrange(value.ndim)
    size = shape[dim]
    if not size:
        raise Refused
    count = d.one([0, 1, 2, 3, 5])

    def index(sizes: tuple[int, ...]) -> str:
        return d.input(sizes, "int64", values=f"below{size}", grad=False)

    full = (*shape[:dim], count, *shape[dim + 1 :])
    name = d.name()
    kind = d.one(
        words(
            "select gather take_along scatter scatter_add masked index_put index_add embedding "
            "getitem index_copy index_fill tri roll flip where repeat pad put"
        )
    )
    if kind == "select":
        return f"{name} = torch.index_select({x}, {dim}, {index((count,))})"
    if kind in ("gather", "take_along"):
        i = index(full)
        if kind == "gather":
            return f"{name} = torch.gather({x}, {dim}, {i})"
        return f"{name} = torch.take_along_dim({x}, {i}, {dim})"
    if kind in ("scatter", "scatter_add"):
        i, source = index(full), d.input(full, dtype_name(value))
        return (
            f"{name} = torch.{kind}({x}, {dim}, {i}, {source})"
            if kind == "scatter_add" or count == 1
            else f"{name} = torch.scatter_add({x}, {dim}, {i}, {source})"
        )
    if kind == "masked":
        mask = d.input(shape, "bool", grad=False)
        return f"{name} = {x}.masked_fill({mask}, {d.number()})"
    if kind == "index_put":
        z = writable(d, has_dims(1, 2))
        if not d.values[z].shape[0]:
            raise Refused
        i = d.input((count,), "int64", values=f"below{d.values[z].shape[0]}", grad=False)
        return written(d, z, f"{z}[{i}] = {d.number()}")
    if kind in ("index_add", "index_copy"):
        count = d.source.randint(0, size)
        i, source = (
            index((count,)),
            d.input((*shape[:dim], count, *shape[dim + 1 :]), dtype_name(value)),
        )
        return f"{name} = torch.{kind}({x}, {dim}, {i}, {source})"
    if kind == "index_fill":
        return f"{name} = torch.index_fill({x}, {dim}, {index((count,))}, {d.number()})"
    if kind == "embedding":
        w = d.input((5, d.one([2, 3, 4])), d.one(FLOATS), values="mixed")
        i = d.input(d.shape(d.one([1, 2])), "int64", values="below5", grad=False)
        if d.chance(0.3):
            o = d.input((2,), "int64", values="zeros", grad=False)
            i = d.input((4,), "int64", values="below5", grad=False)
            return (
                f"{name} = F.embedding_bag({i}, {w}, {o}, mode={d.one(['sum', 'mean', 'max'])!r})"
            )
        return f"{name} = F.embedding({i}, {w})"
    if kind == "getitem":
        return f"{name} = {x}[{', '.join([':'] * dim + [index((count,))])}]"
    if kind == "tri":
        return f"{name} = torch.{d.one(['tril', 'triu'])}({x}, {d.source.randint(-1, 1)})"
    if kind == "roll":
        return f"{name} = torch.roll({x}, {d.source.randint(-2, 2)}, {dim})"
    if kind == "flip":
        return f"{name} = torch.flip({x}, ({dim},))"
    if kind == "repeat":
        counts = ", ".join(str(d.source.randint(1, 2)) for _ in shape)
        return f"{name} = {x}.{d.one([f'repeat_interleave(2, {dim})', f'repeat({counts})'])}"
    if kind == "pad":
        before, after = d.source.randint(-1, 2), d.source.randint(0, 2)
        return f"{name} = F.pad({x}, ({before}, {after}), value={d.number('if')})"
    return f"{name} = torch.where({d.input(shape, 'bool', grad=False)}, {x}, {d.beside(x)})"


@producer("joins", 2)
def join(d: Draw) -> str:
    x = d.tensor(is_any, has_dims(1, 2, 3))
    value = d.values[x]
    dim = d.source.randrange(value.ndim)
    shape = list(value.shape)
    shape[dim] = d.size()
    y = d.input(tuple(shape), dtype_name(value) if d.chance(0.7) else None)
    if d.chance(0.3):
        return f"{d.name()} = torch.stack([{x}, {d.beside(x)}], {dim})"
    return f"{d.name()} = torch.cat([{x}, {y}], {dim})"
