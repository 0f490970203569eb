"""The kinds of lines that models are made of: reductions, products, losses, norms, modules."""

from __future__ import annotations

from .catalog import is_any, producer, words, writable, written
from .drawing import (
    DTYPES,
    FLOATS,
    Draw,
    Refused,
    dtype_name,
    has_dims,
    is_float,
    is_small,
)


def _dims(d: Draw, ndim: int) -> str:
    if d.chance(0.2) or not ndim:
        return ""
    if d.chance(0.25) and ndim > 1:
        first, second = d.source.sample(range(ndim), 2)
        return f", ({first}, {second})"
    return f", {d.source.randrange(-ndim, ndim)}"


def _dtype(d: Draw, share: float) -> str:
    return f", dtype=torch.{d.one(DTYPES)}" if d.chance(share) else ""


# Reductions and scans


@producer("reductions", 4)
def reduction(d: Draw) -> str:
    x = d.tensor(is_any)
    ndim = d.values[x].ndim
    dims = _dims(d, ndim)
    kind = d.one(words("sum mean prod amax amin var std logsumexp any all count_nonzero nansum norm"))
    keep = ", keepdim=True" if dims and d.chance(0.3) and kind != "count_nonzero" else ""
    if kind in ("sum", "mean", "prod", "nansum"):
        keep += _dtype(d, 0.25)
    if kind in ("var", "std") and d.chance(0.3):
        keep += f", correction={d.number('if')}"
    if kind == "norm":
        return f"{d.name()} = torch.linalg.vector_norm({x}, {d.number('if')}{dims.replace(',', ', dim=', 1) if dims else ''}{keep})"
    if kind == "logsumexp" and not dims:
        raise Refused
    return f"{d.name()} = torch.{kind}({x}{dims}{keep})"


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
            ("cat", (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]), "torch.cat([{x}, {x}], {dim}, out={o})"),
            ("norm", short, "torch.linalg.vector_norm({x}, 2, {dim}, out={o})"),
            ("logsumexp", short, "torch.logsumexp({x}, {dim}, out={o})"),
        ]
    )
    if "{y}" in text:
        y = d.beside(x)
    same = dtype_name(value) if kind not in ("argmax", "eq", "all") else None
    dtype = same if same and d.chance(0.4) else d.one(DTYPES)
    o = d.input(out_shape, dtype, grad=False)
    return "with torch.no_grad(): " + text.format(x=x, y=y, o=o, dim=dim)


# Products


@producer("products", 3)
def product(d: Draw) -> str:
    m, k, n = d.size(), d.size(), d.size()
    b = d.source.randint(1, 3)
    dtype = d.dtype if d.chance(0.8) else None
    name = d.name()
    kind = d.one(words("mm linear bmm addmm matmul mv dot outer einsum baddbmm addmv addr tensordot linear_bias"))
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
        return f"{name} = torch.baddbmm({x}, {y}, {z}, beta={d.number('if')}, alpha={d.number('if')})"
    if kind == "addmm":
        x, y, z = d.input((m, n), dtype), d.input((m, k), dtype), d.input((k, n), dtype)
        if d.chance(0.3):
            return f"{x}.addmm_({y}, {z}, alpha={d.number('if')})"
        return f"{name} = torch.addmm({x}, {y}, {z}, beta={d.number('if')}, alpha={d.number('if')})"
    if kind == "addmv":
        x, y, z = d.input((m,), dtype), d.input((m, k), dtype), d.input((k,), dtype)
        return f"{name} = torch.addmv({x}, {y}, {z}, alpha={d.number('if')})"
    if kind == "addr":
        x, y, z = d.input((m, n), dtype), d.input((m,), dtype), d.input((n,), dtype)
        return f"{name} = torch.addr({x}, {y}, {z}, alpha={d.number('if')})"
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
        return f"{name} = torch.tensordot({d.input((b, m, k), dtype)}, {d.input((m, k, n), dtype)}, 2)"
    x = d.tensor(has_dims(2, 3), is_small)
    return f"{name} = {x} @ {x}.transpose(-1, -2)"


# Losses


@producer("losses", 1.5)
def loss(d: Draw) -> str:
    shape = d.shape(d.source.randint(1, 3))
    dtype = d.one(FLOATS)
    target_dtype = dtype if d.chance(0.5) else d.one(FLOATS)
    kind = d.one(
        words("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits "
              "binary_cross_entropy kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss")
    )
    values = "unit" if "entropy" in kind or kind == "kl_div" else "mixed"
    x = d.input(shape, dtype, values="unit" if kind == "binary_cross_entropy" else "mixed")
    t = d.input(shape, target_dtype, values=values, grad=d.chance(0.2))
    how = d.one(["", "", ", reduction='sum'", ", reduction='none'"])
    if kind in ("huber_loss", "smooth_l1_loss") and d.chance(0.3):
        how += f", {'delta' if kind == 'huber_loss' else 'beta'}={d.one([1, 0.5, 2.0])}"
    if kind == "binary_cross_entropy_with_logits" and d.chance(0.3):
        how += f", pos_weight={d.input(shape[-1:], dtype, values='unit', grad=False)}"
    return f"{d.name()} = F.{kind}({x}, {t}{how})"


@producer("losses", 1.5)
def class_loss(d: Draw) -> str:
    rows, classes = d.size(), d.source.randint(1, 6)
    dtype = d.one(FLOATS)
    x = d.input((rows, classes), dtype, values="mixed")
    how = d.one(["", ", reduction='sum'", ", reduction='none'", ", label_smoothing=0.1"])
    if d.chance(0.2):
        t = d.input((rows, classes), dtype, values="unit")
        return f"{d.name()} = F.cross_entropy({x}, {t}{how})"
    t = d.input((rows,), "int64", values=f"below{classes}", strides="rows")
    if d.chance(0.3):
        how += f", ignore_index={d.source.randrange(classes)}"
    if d.chance(0.25):
        how += f", weight={d.input((classes,), dtype, values='unit', grad=False)}"
    if d.chance(0.4):
        how = how.replace(", label_smoothing=0.1", "")
        return f"{d.name()} = F.nll_loss(F.log_softmax({x}, 1), {t}{how})"
    return f"{d.name()} = F.cross_entropy({x}, {t}{how})"


# Norms, attention, what mixes along a dim


@producer("norms", 3)
def norm(d: Draw) -> str:
    b, c, n = d.one([0, 1, 2, 3, 4, 5]), d.one([2, 4, 6, 3]), d.size()
    dtype = d.one(FLOATS)
    name = d.name()
    shape = (b, c, n) if d.chance(0.6) else (b, c, n, d.source.randint(1, 3))
    x = d.input(shape, dtype, values="mixed")

    def vector(size: int) -> str:
        return d.input((size,), dtype if d.chance(0.85) else None, values="unit")

    kind = d.one(words("layer_norm layer_norm2 group_norm instance_norm batch_norm rms_norm softmax log_softmax normalize"))
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
        return f"{name} = F.instance_norm({x}{f', weight={vector(c)}, bias={vector(c)}' if d.chance(0.4) else ''})"
    if kind == "batch_norm":
        if d.chance(0.5):
            m, v = d.input((c,), dtype, grad=False), d.input((c,), dtype, values="unit", grad=False)
            return f"{name} = F.batch_norm({x}, {m}, {v}, training={d.chance(0.6)})"
        affine = f", weight={vector(c)}, bias={vector(c)}" if d.chance(0.5) else ""
        return f"{name} = F.batch_norm({x}, None, None, training=True{affine})"
    if kind == "rms_norm":
        return f"{name} = F.rms_norm({x}, ({shape[-1]},){f', {vector(shape[-1])}' if d.chance(0.5) else ''})"
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


# Indices


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
    kind = d.one(words("select gather take_along scatter scatter_add masked index_put index_add embedding getitem index_copy index_fill tri roll flip where repeat pad put"))
    if kind == "select":
        return f"{name} = torch.index_select({x}, {dim}, {index((count,))})"
    if kind in ("gather", "take_along"):
        i = index(full)
        if kind == "gather":
            return f"{name} = torch.gather({x}, {dim}, {i})"
        return f"{name} = torch.take_along_dim({x}, {i}, {dim})"
    if kind in ("scatter", "scatter_add"):
        i, source = index(full), d.input(full, dtype_name(value))
        return f"{name} = torch.{kind}({x}, {dim}, {i}, {source})" if kind == "scatter_add" or count == 1 else f"{name} = torch.scatter_add({x}, {dim}, {i}, {source})"
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
        i, source = index((count,)), d.input((*shape[:dim], count, *shape[dim + 1 :]), dtype_name(value))
        return f"{name} = torch.{kind}({x}, {dim}, {i}, {source})"
    if kind == "index_fill":
        return f"{name} = torch.index_fill({x}, {dim}, {index((count,))}, {d.number()})"
    if kind == "embedding":
        w = d.input((5, d.one([2, 3, 4])), d.one(FLOATS), values="mixed")
        i = d.input(d.shape(d.one([1, 2])), "int64", values="below5", grad=False)
        if d.chance(0.3):
            o = d.input((2,), "int64", values="zeros", grad=False)
            i = d.input((4,), "int64", values="below5", grad=False)
            return f"{name} = F.embedding_bag({i}, {w}, {o}, mode={d.one(['sum', 'mean', 'max'])!r})"
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
        return f"{name} = {x}.{d.one(['repeat_interleave(2, %d)' % dim, 'repeat(%s)' % ', '.join(str(d.source.randint(1, 2)) for _ in shape)])}"
    if kind == "pad":
        return f"{name} = F.pad({x}, ({d.source.randint(-1, 2)}, {d.source.randint(0, 2)}), value={d.number('if')})"
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


# Modules and optimizers


@producer("modules", 2)
def module(d: Draw) -> str:
    n, m, b = d.one([2, 4, 6]), d.one([2, 3, 4, 5]), d.size()
    dtype = d.one(["float32", "float32", "float64", "bfloat16", "float16"])
    kinds = {
        f"nn.Linear({n}, {m})": (b, n),
        f"nn.LayerNorm({n})": (b, 3, n),
        f"nn.GroupNorm(2, {n})": (b, n, 3),
        f"nn.BatchNorm1d({n})": (b, n),
        f"nn.BatchNorm2d({n})": (b, n, 2, 2),
        f"nn.Conv1d({n}, {m}, 2)": (b, n, 4),
        f"nn.Conv2d({n}, {m}, 2, padding=1)": (b, n, 3, 3),
        f"nn.Sequential(nn.Linear({n}, {m}), nn.GELU(), nn.Linear({m}, {n}))": (b, 2, n),
        f"nn.RMSNorm({n})": (b, n),
        f"nn.MultiheadAttention({n}, 2, batch_first=True)": (b, 3, n),
        f"nn.TransformerEncoderLayer({n}, 2, {2 * n}, dropout=0.0, batch_first=True)": (b, 3, n),
        f"nn.Bilinear({n}, 3, {m})": (b, n),
        f"nn.PReLU({n})": (b, n),
        f"nn.LSTMCell({n}, {m})": (b, n),
    }
    text = d.one(list(kinds))
    shape = kinds[text]
    x = d.input(shape, dtype, values="mixed")
    placements = d.placements((4, 4))
    if "Ragged" in placements or "Packed" in placements:
        placements = ", ".join(d.one(["R", "S(0)", "S(1)"]) for _ in d.mesh)
    how = f", dtype=torch.{dtype}" if dtype != "float32" else ""
    name = d.name()
    args = {"MultiheadAttention": f"{x}, {x}, {x}, need_weights=False", "Bilinear": f"{x}, {x}[:, :3]"}
    called = args.get(text[3 : text.index("(")], x)
    d.env["modules"] = None
    return f"{name}_m = module({text}, {placements!r}{how}); {name} = {name}_m({called})"


@producer("optimizers", 1)
def optimizer(d: Draw) -> str:
    dtype = d.one(["float32", "float32", "float64", "bfloat16"])
    shape = d.shape(d.one([0, 1, 2]))
    p, g = d.input(shape, dtype, grad=True), d.input(shape, dtype, grad=False)
    plain = d.chance(0.5)
    shape = () if plain and d.chance(0.7) else d.shape(1)
    q, h = d.input(shape, dtype, grad=True, plain=plain), d.input(shape, dtype, grad=False, plain=plain)
    kind = d.one(words("SGD Adam AdamW RAdam NAdam Adagrad Adadelta RMSprop Rprop Adamax ASGD"))
    options = d.one([", foreach=True", ", foreach=True", ", foreach=False", ""])
    if kind == "SGD":
        options += d.one(["", ", momentum=0.5", ", momentum=0.5, nesterov=True", ", weight_decay=0.1"])
    if kind in ("Adam", "AdamW") and d.chance(0.2):
        options = d.one([", amsgrad=True, foreach=True", ", fused=True", ", maximize=True"])
    return f"step(torch.optim.{kind}, [{p}, {q}], [{g}, {h}], lr=0.25{options})"
