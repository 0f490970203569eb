"""Lines of losses."""

from __future__ import annotations

from ..drawing import FLOATS, Draw
from .producers import producer, words


@producer("losses", 1.5)
def loss(d: Draw) -> str:
    shape = d.shape(d.source.randint(1, 3))
    dtype = d.one(FLOATS)
    target_dtype = dtype if d.chance(0.5) else d.one(FLOATS)
    kind = d.one(
        words(
            "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits "
            "binary_cross_entropy kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss"
        )
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
