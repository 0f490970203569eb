"""``register_sharding(check=True)`` finds every sharding that is wrong, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import (
    DeviceMesh,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    experimental,
    register_sharding,
)
from dtckpt.dtensor.ops.engine.table import RULES
from tests.dtensor.rank_meshes import assert_holds, collectives, run_on_mesh

torch.library.define("checked::scaled", "(Tensor x, Tensor y, int dim) -> (Tensor, Tensor)")
torch.library.define("checked::flags", "(Tensor x) -> Tensor")
torch.library.define("checked::picks", "(Tensor x, Tensor[] rest) -> Tensor")


@torch.library.impl("checked::scaled", "CompositeExplicitAutograd")
def scaled_(x: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Rows times numbers, and their sum."""
    made = x * y
    return made, made.sum(dim)


@torch.library.impl("checked::flags", "CompositeExplicitAutograd")
def flags_(x: Tensor) -> Tensor:
    """Whether anything is true along the first dim."""
    return x.any(0)


@torch.library.impl("checked::picks", "CompositeExplicitAutograd")
def picks_(x: Tensor, rest: list[Tensor]) -> Tensor:
    """The largest of some."""
    return torch.stack([x, *rest]).amax(0)


ops = torch.ops.checked
R, S, P = Replicate(), Shard, Partial
X = torch.arange(24.0).view(6, 4) % 7


@pytest.fixture(autouse=True)
def rules_end() -> Generator[None]:
    """Take away what a test has registered."""
    known, by_users = dict(RULES), set(RULES.by_users)
    yield
    RULES.clear()
    RULES.update(known)
    RULES.by_users = by_users
    RULES.generation += 1


def listing(rows: Any) -> Callable[..., Any]:
    return lambda *_: rows


RIGHT: Any = [
    ([R, R], [R, R, None]),
    ([S(0), P()], [S(0), S(0), None]),
    ([S(1), S(0)], [S(1), R, None]),
    ([P(), P()], [P(), R, None]),
    ([P("avg"), P("avg")], [P("avg"), R, None]),
]
WRONG: dict[str, tuple[Any, str]] = {
    "sum of a part": (([S(0), R], [S(0), S(0), None]), r"output 1, on rank 0, differs by up to"),
    "another reduction": (([S(0), P("max")], [S(0), S(0), None]), r"output 1, reduced, differs by"),
    "two terms multiplied": (([P(), P()], [P(), P(), None]), r"output 0, reduced, differs by"),
    "extremes": (([P("max"), P()], [P("max"), R, None]), r"output [01], reduced, differs by"),
    "another dim": (([S(1), P()], [S(0), S(0), None]), r"output 0, on rank 0, has shape \(3, 4\)"),
    "shapes that do not meet": (([S(0), P()], [S(1), S(0), None]), r"rank 0 raises RuntimeError"),
}


@pytest.mark.parametrize(
    "register", [register_sharding, experimental.register_sharding], ids=["short", "documented"]
)
def test_right_ones_are_used(register: Any) -> None:
    register(ops.scaled.default, check=True)(listing(RIGHT))

    def body(mesh: DeviceMesh) -> None:
        x, y = distribute_tensor(X, mesh, [S(0)]), distribute_tensor(X[:, :1].clone(), mesh, [S(0)])
        with collectives() as seen:
            made, total = ops.scaled(x, y, 0)
        assert seen == []
        assert made.placements == (S(0),)
        assert total.placements == (P(),)
        assert_holds(made, X * X[:, :1])

    run_on_mesh((2,), body)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_named_on_all_ranks(name: str) -> None:
    row, told = WRONG[name]
    register_sharding(ops.scaled.default, check=True)(listing([*RIGHT, row]))

    def body(mesh: DeviceMesh) -> str:
        x, y = distribute_tensor(X, mesh, [S(0)]), distribute_tensor(X[:, :1].clone(), mesh, [R])
        with collectives() as seen, pytest.raises(PlacementError, match=told) as caught:
            ops.scaled(x, y, 0)
        assert seen == []
        return str(caught.value)

    one, other = run_on_mesh((2,), body)
    assert one == other
    assert ", ".join(map(str, row[1][:2])) in one
    assert "over 2 ranks" in one


def test_a_sharding_that_is_right_for_even_parts_only() -> None:
    """12 rows are even for 2, 3 and 4 ranks, so 5 are tried, too."""

    @torch.library.custom_op("checked::paired", mutates_args=())
    def paired(x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            return x * 0
        return x + x.view(-1, 2, x.shape[1]).sum(1).repeat_interleave(2, 0)

    paired.register_fake(torch.empty_like)
    op = torch.ops.checked.paired.default
    register_sharding(op, check=True)(listing([([S(0)], [S(0)])]))

    def body(mesh: DeviceMesh) -> None:
        with pytest.raises(PlacementError, match=r"over 5 ranks the output, joined, differs"):
            op(distribute_tensor(X.repeat(2, 1), mesh, [S(0)]))

    run_on_mesh((2,), body)


def test_nothing_is_cut_evenly_by_any_number() -> None:
    register_sharding(ops.scaled.default, check=True)(listing(RIGHT))

    def body(mesh: DeviceMesh) -> None:
        x, y = distribute_tensor(X[:0], mesh, [S(0)]), distribute_tensor(X[:0, :1], mesh, [S(0)])
        assert_holds(ops.scaled(x, y, 0)[0], X[:0])

    run_on_mesh((2,), body)


def test_bools_lists_and_whole_numbers() -> None:
    register_sharding(ops.flags.default, check=True)(
        listing([([P("max")], [S(0)]), ([P("max")], [P("max")]), ([S(0)], [S(1)])])
    )
    register_sharding(ops.picks.default, check=True)(
        listing([([one], [one] * 3) for one in (S(0), S(1), P("max"))])
    )
    whole = X.long()

    def body(mesh: DeviceMesh) -> None:
        flags: Any = ops.flags(distribute_tensor(whole > 3, mesh, [S(0)]))
        assert torch.equal(flags.full_tensor(), (whole > 3).any(0))
        parts = [distribute_tensor(whole + i, mesh, [S(0)]) for i in range(3)]
        assert_holds(ops.picks(parts[0], parts[1:]), whole + 2)

    run_on_mesh((2,), body)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(PlacementError, match="draws random numbers"):
        register_sharding(torch.ops.aten.bernoulli.default, check=True)
    register_sharding(torch.ops.aten.index_select.default, check=True)(
        listing([([R], [R, None, R])])
    )

    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(X[:1].clone(), mesh, [S(1)])
        index: Any = distribute_tensor(torch.zeros(9, dtype=torch.int64), mesh, [R])
        with pytest.raises(PlacementError, match="cannot be checked: on random values"):
            torch.index_select(x, 0, index)

    run_on_mesh((2,), body)
