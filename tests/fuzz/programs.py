"""Programs that the fuzzer found to be wrong, or to hang, each shrunk: they are right now.

A new finding is an entry here, named by what was wrong. ``test_programs.py`` runs all of them.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any

from .program import UNTOLD, Input, Program


def _of(inputs: dict[str, Input], *lines: str, **given: Any) -> Program:
    return Program(inputs=inputs, lines=lines, **given)


def _in(
    shape: tuple[int, ...], placements: str = "", dtype: str = "float32", **given: Any
) -> Input:
    return Input(shape=shape, placements=placements, dtype=dtype, **given)


_NUMBERS: dict[str, Program] = {
    "floor division by 2, then by 2.0": _of(
        {"a": _in((4, 6), "S(0)", "int64")},
        "b = a // s0",
        runs=({"s0": 2}, {"s0": 2.0}),
    ),
    "floor division by 3.0, then by 3": _of(
        {"a": _in((2,), "S(0)", "int64")},
        "b = a // s0",
        runs=({"s0": 3.0}, {"s0": 3}),
    ),
    "powers of a list by 2.0, then by 2": _of(
        {"a": _in((), "R", "int64")},
        "b = torch._foreach_pow([a, a], s0)",
        runs=({"s0": 2.0}, {"s0": 2}),
    ),
    "partial sum times infinity": _of(
        {"a": _in((2,), "P(sum)")}, "b = torch.add(a, a, alpha=s0)", runs=({"s0": inf},)
    ),
    "partial sum times infinity, subtracted from": _of(
        {"a": _in((2,), "R"), "b": _in((), "P(sum)")},
        "x = torch.rsub(a, b, alpha=s0)",
        runs=({"s0": inf},),
    ),
    "partial sum divided by zero": _of(
        {"a": _in((2,), "P(sum)")}, "b = torch._foreach_div([a, a], s0)", runs=({"s0": 0},)
    ),
    **{
        f"infinite scale of a product that is cut: {line}": _of(
            {
                "a": _in((4, 4), "S(1)", values="positive"),
                "b": _in((4, 4), "S(0)", values="positive"),
                "c": _in((4, 4), placements),
            },
            line,
            runs=({"s0": inf},),
        )
        for placements, line in (
            ("R", "x = torch.addmv(c[0], a, b[0], beta=s0)"),
            ("P(sum)", "x = torch.addr(c, a[0], b[0], alpha=s0)"),
            ("P(sum)", "c.addmm_(a, b, alpha=s0)"),
        )
    },
    "not-a-number pads integers, on a rank that pads": _of(
        {"a": _in((1, 2), "S(1)", "int64")}, "x = F.pad(a, (0, 2), value=s0)", runs=({"s0": nan},)
    ),
    "a value that unsigned bytes lack pads nothing, on a rank without any": _of(
        {"a": _in((2,), "S(0)", "uint8")}, "x = F.pad(a, (-1, 0), value=s0)", runs=({"s0": -2},)
    ),
    "integers divided by zero where a part is empty": _of(
        {"a": _in((1,), "S(0)", "int64")},
        "x = torch.div(a, s0, rounding_mode='floor')",
        runs=({"s0": 0},),
    ),
    "float beta of integers where a part is empty": _of(
        {"a": _in((1, 1), "R", "int64"), "b": _in((1, 1), "S(0)", "int64")},
        "x = torch.addmm(a, a, b, beta=s0, alpha=2)",
        runs=({"s0": 2.0},),
    ),
    "infinite alpha of integers where a part is empty": _of(
        {
            "a": _in((1,), "R", "int64"),
            "b": _in((1, 1), "S(0)", "int64"),
            "c": _in((1,), "R", "int64"),
        },
        "x = torch.addmv(a, b, c, alpha=s0)",
        runs=({"s0": -inf},),
    ),
    "norm of order -1 along one of two dims, the other empty": _of(
        {"a": _in((1, 0), "R")},
        "x = torch.linalg.vector_norm(a, s0, dim=-2, keepdim=True)",
        runs=({"s0": -1},),
    ),
    "norm of order -1 of nothing": _of(
        {"a": _in((0, 3), "S(0)")},
        "x = torch.linalg.vector_norm(a, s0, dim=(0, 1))",
        runs=({"s0": -1},),
    ),
    "integers and floats without elements in einsum": _of(
        {"a": _in((1, 1, 0), "R"), "b": _in((1, 1, 0), "R", "int64")},
        "x = torch.einsum('bmk,bnk->bn', a, b)",
    ),
    "float alpha of unsigned bytes where a part is empty": _of(
        {"a": _in((1,), "R", "uint8"), "b": _in((1, 1), "S(0)", "uint8")},
        "x = torch.addmv(a, b, a, alpha=s0)",
        runs=({"s0": -1.5},),
    ),
    "bool with strides to a bool power": _of(
        {"b": _in((1,), "R", "bool", strides="stepped_rows")},
        "x = torch.pow(b, s0)",
        runs=({"s0": True},),
    ),
    "product of rows divided by False": _of(
        {"a": _in((2, 2, 2), "S(2)")},
        "x = a @ a.transpose(-1, -2)",
        "y = x / s0",
        runs=({"s0": False},),
    ),
    "gradient of a plain number modulo a tensor": _of(
        {"a": _in((5,), "S(0)", values="positive", grad=True), "p": _in((), values="ones")},
        "x = p % a",
        "g = gradients([x], [a])",
    ),
    "integers divided by a tensor with a zero in one part": _of(
        {"a": _in((5,), "S(0)", "int64")}, "x = a % a"
    ),
    "integers divided in place by a minimum that is zero": _of(
        {"a": _in((5,), "P(min)", "int64")}, "a.remainder_(a)"
    ),
    "variance with a correction that is not a number": _of(
        {"a": _in((2,), "S(0)")}, "x = torch.var(a, 0, correction=s0)", runs=({"s0": nan},)
    ),
    "variance of integers where a part is empty": _of(
        {"a": _in((1, 2), "S(0)", "int64")}, "x = a.var(1)"
    ),
    "cumprod of nothing to bools": _of(
        {"a": _in((0,), "S(0)")}, "x = torch.cumprod(a, 0, dtype=torch.bool)"
    ),
    "cumprod of nothing into bools": _of(
        {"a": _in((0, 1), "R"), "o": _in((0, 1), "R", "bool")}, "torch.cumprod(a, 1, out=o)"
    ),
    "cumsum of bools where a part is empty": _of(
        {"a": _in((1, 2), "S(0)")}, "x = torch.cumsum(a, 1, dtype=torch.bool)"
    ),
    "bool to a bool power": _of(
        {"a": _in((), "R", "bool")}, "x = torch._foreach_pow([a, a], s0)", runs=({"s0": True},)
    ),
}

_PLAIN_SCALARS: dict[str, Program] = {
    f"plain scalar: {line}": _of(
        {"a": _in((), "R", values=values), "p": _in((), values=other)}, line, **given
    )
    for line, values, other, given in (
        ("p.add_(a)", "positive", "ones", {}),
        ("p += a", "positive", "ones", {}),
        ("p.hypot_(a)", "positive", "ones", {}),
        ("p.clamp_(a)", "mixed", "mixed", {}),
        ("p.lerp_(a, s0)", "mixed", "mixed", {"runs": ({"s0": 2},)}),
        ("p.addcdiv_(a, a)", "positive", "ones", {}),
        ("p.addcmul_(a, a)", "positive", "ones", {}),
        ("p.logical_xor_(a)", "positive", "ones", {}),
        ("torch._foreach_sub_([p, a], s0)", "positive", "ones", {"runs": ({"s0": 2},)}),
        ("torch._foreach_mul_([p, a], s0)", "positive", "ones", {"runs": ({"s0": 2},)}),
        ("torch._foreach_sqrt_([a, p])", "mixed", "positive", {}),
        ("torch._foreach_copy_([p, a], [a, p])", "positive", "ones", {}),
        ("step(torch.optim.RAdam, [a, p], [a, a], lr=0.25, foreach=True)", "mixed", "mixed", {}),
    )
}
_PLAIN_SCALARS["plain scalar: torch.copysign(p, a), a empty"] = _of(
    {"a": _in((0,), "R"), "p": _in(())}, "x = torch.copysign(p, a)"
)

_STRIDED: dict[str, Program] = {
    "attention of values with strides": _of(
        {
            "a": _in((1, 2, 1, 2), "R"),
            "b": _in((1, 2, 1, 2), "R", strides="stepped", made_by=UNTOLD),
        },
        "x = F.scaled_dot_product_attention(a, a, b)",
    ),
    "attention of queries with strides, sharded": _of(
        {"a": _in((4, 6, 2, 3), "S(0)", strides="stepped", made_by=UNTOLD, grad=True)},
        "x = F.scaled_dot_product_attention(a, a, a)",
        "g = gradients([x], [a])",
    ),
    "attention of transposed parts, one empty": _of(
        {"a": _in((2, 1, 1, 2), "S(2)", strides="transposed", made_by=UNTOLD)},
        "x = F.scaled_dot_product_attention(a, a, a, is_causal=True)",
    ),
    "attention of transposed parts that meets other layouts": _of(
        {
            "a": _in((1, 2, 1, 2), "R"),
            "b": _in((1, 2, 1, 2), "S(0)", strides="transposed", made_by=UNTOLD),
        },
        "x = F.scaled_dot_product_attention(a, b, b, scale=1.0)",
    ),
    "group norm of a weight with strides": _of(
        {"a": _in((1, 3, 2), "R"), "b": _in((3,), "R", strides="stepped_rows", made_by=UNTOLD)},
        "x = F.group_norm(a, 3, b, b)",
    ),
    **{
        f"norm of transposed values lies in rows: {norm}, {placements}": _of(
            {"a": _in((2, 4, 3), placements, grad=True)},
            f"x = F.{norm}",
            "y = x.view(-1)",
            "g = gradients([y], [a])",
            "z = g[0].view(-1)",
        )
        for norm in ("batch_norm(a.mT, None, None, training=True)", "layer_norm(a.mT, (4,))")
        for placements in ("R", "S(1)", "P(sum)")
    },
    **{
        f"{line} of transposed values lies in rows, {placements}": _of(
            {"a": _in((2, 4), placements, grad=True)},
            "m = a.sigmoid().t()",
            f"x = F.{line}",
            "y = x.view(-1)",
            *(["g = gradients([y], [m])", "z = g[0].view(-1)"] if "softmax" in line else []),
        )
        for line in ("softmax(m, 0)", "log_softmax(m, 0)", "rrelu(m, 0.5, 0.5, training=True)")
        for placements in ("R", "Packed(1:4)")
    },
    **{
        f"{line} of transposed values is viewed as on one device": _of(
            {"a": _in((2, 4), "S(0)", grad=True)},
            "m = a.sigmoid().t()",
            f"x = {line}",
            f"y = x{view}.view(-1)" if view is not None else "g = gradients([x], [m])",
            *(["z = g[0].view(-1)"] if view is None else []),
        )
        for line, view in (
            ("m.masked_fill(m > 0.5, 2)", ""),
            ("F.logsigmoid(m)", ""),
            ("torch.xlogy(m.contiguous(), m)", ""),
            ("2.0**m", ""),
            ("F.binary_cross_entropy(m, m.detach().contiguous(), reduction='none')", ".t()"),
            ("F.elu(m)", None),
            ("F.hardtanh(m)", None),
            ("F.softplus(m)", None),
            ("F.mse_loss(m, m.detach() * 2)", None),
            ("F.huber_loss(m, m.detach() * 2)", None),
        )
    },
    "flattened softmax of transposed values is written": _of(
        {"a": _in((2, 4), "Packed(1:4)", strides="transposed")},
        "x = F.softmax(a, 1)",
        "y = x.flatten(); y.ge_(s0)",
        runs=({"s0": 2},),
    ),
    "elements put into transposed values lie as those": _of(
        {"a": _in((2, 4), "S(0)")},
        "x = a.t().put(torch.tensor([1]), torch.tensor([2.0]))",
        "y = x.t().view(-1)",
    ),
    "contiguous() of a part with strides is a copy": _of(
        {"a": _in((4, 6), "S(0)", strides="stepped")}, "b = a.contiguous()", "b.add_(1)"
    ),
    "contiguous() of a part with strides stays when that is written": _of(
        {"a": _in((5, 5), "R", strides="stepped")}, "b = a.contiguous()", "a.mul_(2)"
    ),
    "contiguous() of transposed parts, one empty": _of(
        {"a": _in((1, 2, 5), "S(0)", strides="transposed", grad=True)},
        "x = a.contiguous()",
        "x[:, -1, 4] = 2",
    ),
    "contiguous() of what an operator makes of an expanded part": _of(
        {"a": _in((2, 2), "R", strides="expanded")},
        "x = torch.clamp_max(a, 2)",
        "y = x.contiguous()",
        "y[...] = 2",
    ),
}

_VIEWS: dict[str, Program] = {
    "write by .data to a viewed tensor": _of(
        {"a": _in((4, 6), "S(1)")}, "b = a.reshape(-1)", "a.data.add_(1)", "c = b * 2"
    ),
    "write by .data to a slice's tensor": _of(
        {"a": _in((5,), "S(0), S(0)")}, "b = a[None, 2:]", "a.data.add_(a)", mesh=(2, 2)
    ),
    "write by .data of another view": _of(
        {"a": _in((2, 2), "S(1)"), "b": _in((), "R")},
        "x = a.unsqueeze(1)",
        "y = a[:, -1]",
        "x.data.copy_(b)",
    ),
    "data of a view with strides is set": _of(
        {"a": _in((2, 1), "R", strides="stepped_rows"), "b": _in((2, 1), "R", seed=51)},
        "x = a.contiguous()",
        "x.data = b.clone()",
    ),
    "comparison in place of a view of a partial, sharded tensor": _of(
        {"a": _in((4, 6), "P(sum), S(1)")}, "b = a.view(-1)", "b.ge_(1)", mesh=(2, 2)
    ),
    "logical_or_ of a view of a partial, sharded tensor": _of(
        {"a": _in((4, 6), "P(sum), S(1)")}, "b = a.view(-1)", "b.logical_or_(b)", mesh=(2, 2)
    ),
    "number copied": _of({"a": _in((), "R")}, "a.copy_(s0)", runs=({"s0": 2},)),
    "comparison in place of a partial, sharded view": _of(
        {"a": _in((3, 2, 3), "S(2), P(sum)"), "b": _in((), "R, R")},
        "x = a.view(-1)",
        "x.eq_(b)",
        mesh=(2, 2),
    ),
    "flattened copy of transposed parts of one row is written": _of(
        {"a": _in((2, 2), "S(0)", strides="transposed")},
        "x = a.flatten()",
        "x.mul_(2)",
    ),
    "partial and plain scalar copied to each other": _of(
        {"a": _in((), "P(sum)", values="positive"), "p": _in(())},
        "torch._foreach_copy_([p, a], [a, p])",
    ),
    "bag of an index of nothing": _of(
        {"a": _in((1, 1), "R"), "b": _in((1,), "R", "int64", values="zeros")},
        "x = F.embedding_bag(b, a, b, mode='sum')",
    ),
    "unbind along a dim without elements": _of({"a": _in((0,), "R")}, "x = a.unbind(0)"),
    "complex slice without elements is set": _of(
        {"a": _in((1, 1, 1), "R", "complex64"), "b": _in((), "R", grad=True)}, "a[:, 4:, 5:] = b"
    ),
    "floats written to a view of integers that had to be copied": _of(
        {"a": _in((4, 1), "S(0)", "int64")}, "x = a[1]", "x.mul_(s0)", runs=({"s0": 2.5},)
    ),
    "floats written to a list of such views": _of(
        {"a": _in((4, 1), "S(0)", "int64")},
        "x = a[1]",
        "torch._foreach_mul_([x, a], s0)",
        runs=({"s0": 2.5},),
    ),
    "one tensor twice in a list written in place": _of(
        {"a": _in((), "P(sum)", values="ones")}, "torch._foreach_add_([a, a], 2.0)"
    ),
}

_DTYPES: dict[str, Program] = {
    "infinite scale of a wider quotient, in place": _of(
        {"a": _in((2, 1), "P(sum)", "float16"), "c": _in((2, 1), "R")},
        "a.addcdiv_(c, c, value=s1)",
        runs=({"s1": float("inf")},),
    ),
    "gradient of a part that is given where one rank has nothing of either": _of(
        {
            "a": _in((5, 4, 7), "R", "float16"),
            "b": _in((4,), "P(sum)", grad=True),
            "d": _in((1, 1, 1), "S(1)", grad=True),
        },
        "x0 = F.instance_norm(a, weight=b, bias=b)",
        "x0[2:3, 3:4, 3:4] = d",
        "g = gradients([x0], [b, d])",
    ),
    "comparison with a part that has strides on one rank": _of(
        {
            "a": _in((5, 1), "S(0)"),
            "b": _in(
                (5, 1),
                "Ragged(0:0,5)",
                strides="stepped_rows",
                made_by="from_local without strides",
            ),
        },
        *(f"x{n} = a {symbol} b" for n, symbol in enumerate(("<", "<=", ">", ">=", "==", "!="))),
        *(f"y{n} = b {symbol} a" for n, symbol in enumerate(("<", "<=", ">", ">=", "==", "!="))),
    ),
    "amax of no complex numbers": _of(
        {"a": _in((0, 1), "Ragged(1:0,1)", "complex64"), "b": _in((0,), "R", "complex64")},
        "torch.amax(a, 1, out=b)",
    ),
    "cumsum in place of a view of no booleans": _of(
        {"a": _in((1, 1), "S(0)", "bool")}, "x = a[4:4:2, :3:2]", "x.cumsum_(1)"
    ),
    "power in place of no booleans": _of(
        {"a": _in((0,), "R", "bool")}, "a.pow_(s0)", runs=({"s0": False},)
    ),
    "all of one element, with out= of integers": _of(
        {"a": _in((1, 1), "R", values="positive"), "b": _in((1,), "R", "uint8")},
        "torch.all(a, 1, out=b)",
    ),
    "cumsum with a small dtype along the sharded dim": _of(
        {"a": _in((2,), "S(0)")}, "x = torch.cumsum(a, -1, dtype=torch.int16)"
    ),
    "cumsum with dtype=int32 of int32": _of(
        {"a": _in((5, 5), "S(1)", "int32")}, "x = torch.cumsum(a, 1, dtype=torch.int32)"
    ),
    "cumprod with a small dtype where a part is empty": _of(
        {"a": _in((1,), "S(0)")}, "x = torch.cumprod(a, -1, dtype=torch.int16)"
    ),
    "sum into integers": _of(
        {"a": _in((4, 6), "S(0)"), "o": _in((6,), "R", "int64")}, "torch.sum(a, 0, out=o)"
    ),
    "cumsum into integers": _of(
        {"a": _in((2, 2, 3), "R"), "o": _in((2, 2, 3), "R", "int64")}, "torch.cumsum(a, 2, out=o)"
    ),
    "prod into integers": _of(
        {"a": _in((2, 8), "R", values="positive"), "o": _in((8,), "R", "int64")},
        "torch.prod(a, 0, out=o)",
    ),
    "cumprod into integers": _of(
        {"a": _in((5, 6), "R"), "o": _in((5, 6), "R", "int64")}, "torch.cumprod(a, 0, out=o)"
    ),
    "all into uint8": _of(
        {"a": _in((2,), "R"), "o": _in((), "R", "uint8")}, "torch.all(a + 0.25, 0, out=o)"
    ),
    "elements and their places into other dtypes": _of(
        {
            "a": _in((2, 3), "S(0)"),
            "o": _in((2,), "R", "float64"),
            "i": _in((2,), "R", "int64"),
        },
        "torch.max(a, 1, out=(o, i))",
    ),
    **{
        f"{line} gives its shape to what takes it, {placements}": _of(
            {"o": _in((0,), placements)}, line
        )
        for placements in ("R", "S(0)")
        for line in ("torch.full((2,), 3, out=o)", "torch.linspace(0, 1, 3, out=o)")
    },
    "all into a float": _of({"a": _in((2,), "R"), "o": _in((), "R")}, "torch.all(a, 0, out=o)"),
    "argmax into a float": _of(
        {"a": _in((2,), "R"), "o": _in((), "R")}, "torch.argmax(a, 0, out=o)"
    ),
    "exp into integers": _of(
        {"a": _in((2,), "R"), "o": _in((2,), "R", "int64")}, "torch.exp(a, out=o)"
    ),
    "integers with strides and one low float": _of(
        {"a": _in((2, 2), "R", "int64", strides="transposed"), "b": _in((), "", "bfloat16")},
        "x = torch.ldexp(a, b)",
    ),
    "gradient of a layer norm before a product, bfloat16": _of(
        {"a": _in((4, 8, 16), "R", "bfloat16", grad=True), "w": _in((8, 16), "S(0)", "bfloat16")},
        "x = F.linear(F.layer_norm(a, (16,)), w)",
        "g = gradients([x], [a])",
    ),
    **{
        f"{loss} of {dtype} and float32": _of(
            {"a": _in((2, 2), placements, dtype, grad=loss != "huber_loss"), "t": _in((2, 2), "R")},
            f"x = F.{loss}(a, t{how})",
            *(["g = gradients([x], [a])"] if loss != "huber_loss" else []),
        )
        for loss, dtype, placements, how in (
            ("mse_loss", "bfloat16", "R", ""),
            ("mse_loss", "float16", "S(0)", ", reduction='none'"),
            ("smooth_l1_loss", "float16", "S(0)", ""),
            ("huber_loss", "float16", "R", ", reduction='none'"),
            ("soft_margin_loss", "bfloat16", "R", ", reduction='none'"),
            ("binary_cross_entropy_with_logits", "float16", "S(0)", ""),
        )
    },
    **{
        f"terms of a loss of float16 and {dtype} that are infinite": _of(
            {"a": _in((3, 6, 4), "R", "float16"), "t": _in((3, 6, 4), "S(0)", dtype, seed=61)},
            "x = F.soft_margin_loss(a, t, reduction='sum')",
        )
        for dtype in ("float16", "float32")
    },
    "gradient of the squared error of float32 and float64": _of(
        {"a": _in((1,), "R", grad=True), "t": _in((1,), "R", "float64")},
        "x = F.mse_loss(a, t, reduction='none')",
        "g = gradients([x], [a])",
    ),
}

_EMPTY: dict[str, Program] = {
    "cross entropy with logits of nothing": _of(
        {"a": _in((0,), "S(0)")}, "x = F.binary_cross_entropy_with_logits(a, a, pos_weight=a)"
    ),
    "squared error of nothing": _of({"a": _in((0, 3), "S(0)")}, "x = F.mse_loss(a, a)"),
    "gradient of a group norm of nothing": _of(
        {"a": _in((1, 0), "R", grad=True)},
        "x = F.group_norm(a, 1)",
        "y = 2 / x",
        "g = gradients([y], [a])",
    ),
    **{
        f"of nothing, along a dim of nothing, {placements}: {line}": _of(
            {"a": _in((0, 0), placements)}, f"x = torch.{line}"
        )
        for line, placements in (
            ("mode(a, 1)", "R"),
            ("median(a, 1)", "S(1)"),
            ("max(a, 0)", "S(0)"),
            ("index_select(a, 0, torch.tensor([0]))", "S(0)"),
        )
    },
    **{
        f"dtypes that nothing has either, {placements}: {line}": _of(
            {"a": _in((0, 3), placements, dtype)}, f"x = {line}"
        )
        for line, placements, dtype in (
            ("a.argmax(1)", "S(0)", "bool"),
            ("a.max(1)", "R", "complex64"),
            ("a.var(1)", "R", "int64"),
        )
    },
    "rows of a table without any": _of(
        {"a": _in((0, 2), "S(0)"), "i": _in((1,), "R", "int64", values="zeros")},
        "x = F.embedding(i, a)",
    ),
    "gradient of the weights of a group norm of nothing": _of(
        {"a": _in((1, 3, 0), "R", grad=True), "b": _in((3,), "R", grad=True)},
        "x = F.group_norm(a, 3, b, b)",
        "g = gradients([x], [a, b])",
    ),
}

_WRITES: dict[str, Program] = {
    "standard deviation of nothing with a negative correction": _of(
        {"a": _in((0,), "S(0)")}, "x = torch.std(a, correction=s0)", runs=({"s0": -1.5},)
    ),
    "a write to a view before its tensor gets other data": _of(
        {"a": _in((2, 3), "S(1)")},
        "x = a[1::2, 2]",
        "x.data.copy_(s0)",
        "a.data = a.clone()",
        runs=({"s0": 2},),
    ),
    "a write to no element of an expanded tensor": _of(
        {"a": _in((1,), "S(0)@1, S(0)@0")},
        "x = a.expand(3, -1)",
        "x[3:3:2, 0] = s0",
        runs=({"s0": 2},),
        mesh=(2, 2),
    ),
    "a write with a gradient to no element of an expanded tensor": _of(
        {"a": _in((1, 1), "R"), "b": _in((), "R", grad=True)},
        "x = a.expand(3, -1, -1)",
        "x[1, -1, 1:7] = b",
        "y = x * 2",
        "g = gradients([y], [b])",
    ),
    "one place of a view whose tensor has got a gradient": _of(
        {"a": _in((1, 1), "R"), "b": _in((), "R", grad=True)},
        "x = a.squeeze(0)",
        "a.sub_(b, alpha=s0)",
        "x[0] = s0",
        runs=({"s0": 2},),
    ),
    "one place of an expanded tensor whose rows two axes cut": _of(
        {"a": _in((4, 2), "S(0)@1, S(0)@0")},
        "x = a.expand(3, -1, -1)",
        "x[0] = a * 2",
        "x[1:2] = s0",
        runs=({"s0": 2},),
        mesh=(2, 2),
    ),
    **{
        f"an expanded tensor, {placements}: {line}": _of(
            {"a": _in(shape, placements)}, f"x = a.expand(3, {expanded})", line
        )
        for placements, shape, expanded, line in (
            ("P(min)", (1, 1), "-1, -1", "torch._foreach_zero_([x])"),
            ("P(product)", (2,), "-1", "x.zero_()"),
            ("S(0)", (1,), "-1", "torch._foreach_add_([x], 1)"),
            ("S(0)", (1,), "-1", "x.cumsum_(0)"),
            ("S(0)", (1,), "-1", "x.index_add_(0, torch.tensor([1]), x[:1])"),
        )
    },
    **{
        f"the result has a dim more, {placements}: {line}": _of(
            {"a": _in((1,), placements), "b": _in((1, 1), "R")}, line
        )
        for placements, line in (
            ("R", "a.xlogy_(b)"),
            ("S(0)", "a.remainder_(b)"),
            ("P(sum)", "a.eq_(b)"),
            ("R", "torch._foreach_pow_([a], [b])"),
            ("R", "torch.add(a, b, out=a)"),
            ("R", "a.bernoulli_(b.sigmoid())"),
        )
    },
}

_SPECIAL: dict[str, Program] = {
    "complex products of infinite elements": _of(
        {"a": _in((3, 6, 3), "Ragged(1:4,2)", "bfloat16", values="special")},
        "x = torch.cumprod(a, 1, dtype=torch.complex64)",
        "y = torch.cumprod(x, 1, dtype=torch.float16)",
    ),
    "complex sums of infinite elements": _of(
        {"a": _in((3,), "S(0)", values="special", seed=37)},
        "x = torch.cumsum(a, -1, dtype=torch.complex64)",
    ),
}

_CONSTANT_GRADIENTS: dict[str, Program] = {
    f"a gradient that is plain zeros comes to {line}": _of(
        {"a": _in((2, 4), "S(1)", grad=True), "b": _in((4,), "S(0)", grad=True)},
        f"x = {line}",
        "y = torch.copysign(a, x)",
        f"g = gradients([y], {leaves})",
    )
    for line, leaves in (
        ("F.layer_norm(a, (4,), b, b)", "[a, b]"),
        ("F.log_softmax(a, 1)", "[a]"),
    )
}

_TERMS: dict[str, Program] = {
    "gradient of instance norm, of terms that are larger than the values": _of(
        {
            "b": _in((2, 6, 2), "P(sum)", seed=92, grad=True),
            "c": _in((6,), "R", values="unit", seed=91, grad=True),
        },
        "x = F.instance_norm(b, weight=c, bias=c)",
        "g = accumulated([x], [b, c, c])",
        mesh=(4,),
    ),
}

_ATTENTION: dict[str, Program] = {
    "multi-head attention of transposed parts, one empty": _of(
        {"a": _in((1, 4, 4), "S(0)", strides="transposed")},
        "m = module(nn.MultiheadAttention(4, 2, batch_first=True))",
        "x = m(a, a, a)[0]",
    ),
    "no gradient comes to attention, of which a part is empty": _of(
        {"a": _in((1, 1, 1, 1), "R", grad=True), "m": _in((1, 1), "S(0)")},
        "x = F.scaled_dot_product_attention(a, a, a, attn_mask=m)",
        "y = torch._foreach_clamp_min([x, a], s0)",
        "g = gradients([y[1]], [a])",
        runs=({"s0": 2},),
    ),
}

_COMPILED: dict[str, Program] = {
    "compiled: another float": _of(
        {"a": _in((4,), "S(0)")},
        "x = a * s0",
        runs=({"s0": 1.5}, {"s0": 1.5}, {"s0": 2.5}),
        compiled=True,
    ),
    "compiled: integers divided by a tensor": _of(
        {"a": _in((4,), "S(0)", "int64"), "b": _in((4,), "S(0)", "int64", values="ones")},
        "x = a // b",
        runs=({}, {}),
        compiled=True,
    ),
    "compiled: cumsum where a part is empty": _of(
        {"a": _in((1, 1), "S(0)")}, "x = torch.cumsum(a, -2)", runs=({}, {}), compiled=True
    ),
    "compiled: attention where a part is empty": _of(
        {"a": _in((1, 4, 2, 4), "S(2)")},
        "x = F.scaled_dot_product_attention(a, a, a)",
        runs=({}, {}),
        compiled=True,
    ),
    "compiled: gradient of amax": _of(
        {"a": _in((4, 3, 4), "S(0)", grad=True)},
        "x = a.amax(0)",
        "g = gradients([x], [a])",
        runs=({}, {}),
        compiled=True,
    ),
}

FOUND: dict[str, Program] = {
    **_NUMBERS,
    **_PLAIN_SCALARS,
    **_STRIDED,
    **_VIEWS,
    **_DTYPES,
    **_EMPTY,
    **_WRITES,
    **_SPECIAL,
    **_CONSTANT_GRADIENTS,
    **_TERMS,
    **_ATTENTION,
    **_COMPILED,
}
"""By what was wrong."""
