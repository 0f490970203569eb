"""Indexing, gather and scatter, embeddings and writes to parts: values against one device."""

# pyright: reportUnknownLambdaType=false
# One line per operator.

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .op_cases import Case, check_on

aten = torch.ops.aten

ROWS = torch.tensor([4, -1, 0, 4])
COLUMNS = torch.tensor([[2], [0]])


def _index(values: Tensor, size: int) -> Tensor:
    """An index tensor that is laid out as ``values`` are."""
    return values.detach().long().remainder(size)


def _written(a: Tensor, write: Any) -> Tensor:
    made = a * 1
    write(made)
    return made * 2


def _set(first: Any, *more: Any) -> Any:
    index = (first, *more) if more else first

    def write(a: Tensor, b: Tensor) -> Tensor:
        made = a * 1
        made[index] = b
        return made * 2

    return write


INDEXING = [
    Case("index", lambda a: a[ROWS] * 2, ((5, 3),)),
    Case("index_two", lambda a: a[ROWS[:2], COLUMNS] * 2, ((5, 3),)),
    Case("index_apart", lambda a: a[ROWS, :, COLUMNS] * 2, ((5, 2, 3),)),
    Case("index_inner", lambda a: a[:, COLUMNS, None] * 2, ((4, 3, 2),)),
    Case("index_own", lambda a, i: a[_index(i, 5)] * 2, ((5, 3), (6,))),
    Case("index_list", lambda a: a[[0, 2]] + a[1:3, [0, 1]].sum(), ((5, 3),)),
    Case("index_put", lambda a, b: a.index_put((ROWS[1:],), b) * 2, ((5, 3), (3, 3)), grad=False),
    Case("index_put_add", lambda a, b: a.index_put((ROWS,), b, True), ((5, 3), (4, 3))),
    Case("index_put_two", lambda a, b: a.index_put((ROWS[:2], COLUMNS), b, True), ((5, 3), (2,))),
    Case(
        "index_put_own",
        lambda a, i, b: aten.index_put(a, [None, _index(i, 3)], b, True),
        ((2, 3), (5,), (2, 5)),
    ),
    Case("index_select", lambda a, i: a.index_select(0, _index(i, 5)) * 2, ((5, 3), (6,))),
    Case("index_select_plain", lambda a: a.index_select(-1, ROWS[2:]) * 2, ((3, 5),)),
    Case(
        "index_add",
        lambda a, i, b: a.index_add(0, _index(i, 5), b, alpha=2),
        ((5, 3), (6,), (6, 3)),
    ),
    Case("index_copy", lambda a, b: a.index_copy(1, torch.tensor([4, 0]), b), ((3, 5), (3, 2))),
    Case("index_fill", lambda a: a.index_fill(0, ROWS[2:], 7.0) * 2, ((5, 3),)),
    Case(
        "index_reduce",
        lambda a, b: a.index_reduce(0, ROWS[2:], b, "amax"),
        ((5, 3), (2, 3)),
        grad=False,
    ),
    Case("take", lambda a, i: a.take(_index(i, 15)) * 2, ((5, 3), (4, 2))),
    Case("put", lambda a, b: a.put(ROWS[1:], b) * 2, ((5, 3), (3,))),
    Case("mask", lambda a: [a[a > 2] * 2, a[:, a[0] > 1], a.masked_select(a < 3)], ((5, 3),)),
    Case("take_along_dim", lambda a, i: a.take_along_dim(_index(i, 5), 0) * 2, ((5, 3), (2, 3))),
    Case("masked_fill", lambda a, b: a.masked_fill(b > 2, 7.0) * 2, ((5, 3), (3,))),
    Case("masked_scatter", lambda a, b: a.masked_scatter(a > 3, b) * 2, ((5, 3), (5, 3))),
    Case("one_hot", lambda a: F.one_hot(_index(a, 4), 4) * 2, ((5, 2),), grad=False),
]

SCATTERS = [
    Case("gather", lambda a, i: a.gather(0, _index(i, 5)) * 2, ((5, 3), (6, 3))),
    Case("gather_smaller", lambda a, i: a.gather(1, _index(i, 3)) * 2, ((5, 3), (3, 4))),
    Case(
        "scatter", lambda a, b: a.scatter(0, _index(a, 5), b.detach()), ((5, 1), (5, 1)), grad=False
    ),
    Case("scatter_value", lambda a, i: a.scatter(1, _index(i, 5), 7.0) * 2, ((4, 5), (3, 2))),
    Case(
        "scatter_add", lambda a, i, b: a.scatter_add(0, _index(i, 5), b), ((5, 3), (4, 3), (4, 3))
    ),
    Case(
        "scatter_add_smaller",
        lambda a, i, b: a.scatter_add(1, _index(i, 5), b),
        ((4, 5), (2, 3), (3, 4)),
        grad=False,
    ),
    Case(
        "scatter_reduce",
        lambda a, i, b: a.scatter_reduce(0, _index(i, 5), b, "amax"),
        ((5, 3), (4, 3), (4, 3)),
        grad=False,
    ),
    Case(
        "scatter_mean",
        lambda a, i, b: a.scatter_reduce(0, _index(i, 5), b, "mean"),
        ((5, 3), (4, 3), (4, 3)),
    ),
    Case(
        "scatter_multiply",
        lambda a, i, b: a.scatter(0, _index(i, 5), b, reduce="multiply"),
        ((5, 3), (4, 3), (4, 3)),
        grad=False,
    ),
]

EMBEDDINGS = [
    Case("embedding", lambda w, i: F.embedding(_index(i, 5), w) * 2, ((5, 3), (4, 2))),
    Case(
        "embedding_scaled",
        lambda w, i: F.embedding(_index(i, 5), w, 1, scale_grad_by_freq=True),
        ((5, 3), (7,)),
    ),
    Case("embedding_plain", lambda w: F.embedding(ROWS.remainder(5), w) * 2, ((5, 3),)),
    Case(
        "embedding_renorm",
        lambda w, i: F.embedding(_index(i, 5), w.detach() * 1, max_norm=1.0),
        ((5, 3), (4,)),
        grad=False,
    ),
    Case("bag", lambda w, i: F.embedding_bag(_index(i, 5), w) * 2, ((5, 3), (4, 2))),
    Case(
        "bag_max", lambda w, i: F.embedding_bag(_index(i, 5), w, mode="max") * 2, ((5, 3), (4, 2))
    ),
    Case(
        "bag_sum",
        lambda w, i, s: F.embedding_bag(
            _index(i, 5), w, torch.tensor([0, 2, 2]), mode="sum", per_sample_weights=s
        ),
        ((5, 3), (5,), (5,)),
    ),
]

WRITES = [
    Case("set_row", _set(1), ((5, 3), (3,))),
    Case("set_last", _set(-1, slice(1, None)), ((5, 3), (2,))),
    Case("set_slice", _set(slice(1, 4)), ((5, 3), (3, 3))),
    Case("set_steps", _set(slice(None, None, 2), 1), ((5, 3), (3,))),
    Case("set_broadcast", _set(..., slice(0, 2)), ((5, 3), (1,))),
    Case("set_new_dims", _set(None, 0, None), ((5, 3), (1, 3))),
    Case("set_rows", _set(ROWS[2:]), ((5, 3), (2, 3))),
    Case("set_mixed", _set(slice(1, 3), COLUMNS[:, 0]), ((5, 3), (2, 2))),
    Case("set_int_and_rows", _set(2, COLUMNS[:, 0]), ((5, 3), (2,))),
    Case("set_number", lambda a: _written(a, lambda x: x.__setitem__(slice(2, 4), 7.0)), ((5, 3),)),
    Case("set_one", lambda a: _written(a, lambda x: x.__setitem__((3, 1), 7.0)), ((5, 3),)),
    Case("set_mask", lambda a: _written(a, lambda x: x.__setitem__(x > 3, 0.0)), ((5, 3),)),
    Case(
        "set_mask_rows",
        lambda a, b: _written(a, lambda x: x.__setitem__(x[:, 0] > 2, b)),
        ((5, 3), (3,)),
    ),
    Case(
        "index_put_",
        lambda a, b: _written(a, lambda x: x.index_put_((ROWS,), b, True)),
        ((5, 3), (4, 3)),
    ),
    Case(
        "index_add_",
        lambda a, b: _written(a, lambda x: x.index_add_(0, ROWS.remainder(5), b)),
        ((5, 3), (4, 3)),
    ),
    Case("index_fill_", lambda a: _written(a, lambda x: x.index_fill_(1, ROWS[2:3], 7)), ((5, 3),)),
    Case(
        "scatter_",
        lambda a, i: _written(a, lambda x: x.scatter_(0, _index(i, 5), 7.0)),
        ((5, 3), (2, 3)),
    ),
    Case(
        "scatter_add_",
        lambda a, i, b: _written(a, lambda x: x.scatter_add_(0, _index(i, 5), b)),
        ((5, 3), (2, 3), (2, 3)),
    ),
    Case("put_", lambda a, b: _written(a, lambda x: x.put_(ROWS[1:], b)), ((5, 3), (3,))),
]

CASES = INDEXING + SCATTERS + EMBEDDINGS + WRITES


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("part", range(6))
def test_one_axis(part: int) -> None:
    check_on((4,), CASES[part::6], 4)


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("part", range(6))
def test_two_axes(part: int) -> None:
    check_on((2, 2), CASES[part::6], 1, special=2)
