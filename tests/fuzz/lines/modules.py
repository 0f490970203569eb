"""Lines of modules and optimizers."""

from __future__ import annotations

from ..drawing import Draw
from .producers import producer, words


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
    args = {
        "MultiheadAttention": f"{x}, {x}, {x}, need_weights=False",
        "Bilinear": f"{x}, {x}[:, :3]",
    }
    called = args.get(text[3 : text.index("(")], x)
    d.env["modules"] = None
    return f"{name}_m = module({text}, {placements!r}{how}); {name} = {name}_m({called})"


@producer("optimizers", 1)
def optimizer(d: Draw) -> str:
    dtype = d.one(["float32", "float32", "float64", "bfloat16"])
    kind = d.one(words("SGD Adam AdamW RAdam NAdam Adagrad Adadelta RMSprop Rprop Adamax ASGD"))
    options = d.one([", foreach=True", ", foreach=True", ", foreach=False", ""])
    if kind == "SGD":
        options += d.one(
            ["", ", momentum=0.5", ", momentum=0.5, nesterov=True", ", weight_decay=0.1"]
        )
    if kind in ("Adam", "AdamW") and d.chance(0.2):
        options = d.one([", amsgrad=True, foreach=True", ", fused=True", ", maximize=True"])
    # The fused kernel of one device writes beside the elements of a parameter with strides.
    strides = "rows" if "fused" in options else None
    shape = d.shape(d.one([0, 1, 2]))
    p = d.input(shape, dtype, grad=True, strides=strides)
    g = d.input(shape, dtype, grad=False, strides=strides)
    plain = d.chance(0.5)
    shape = () if plain and d.chance(0.7) else d.shape(1)
    q = d.input(shape, dtype, grad=True, plain=plain, strides=strides)
    h = d.input(shape, dtype, grad=False, plain=plain, strides=strides)
    return f"step(torch.optim.{kind}, [{p}, {q}], [{g}, {h}], lr=0.25{options})"
