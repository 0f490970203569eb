"""The remedies that errors name lose nothing: each error is raised, and its remedy followed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.errors import CheckpointError, LayoutMismatch
from dtckpt.storage import MemoryStore

from ..ranks import run_ranks


def saved(state: Any, **options: Any) -> MemoryStore:
    store = MemoryStore()
    ckpt.save(state, store, **options)
    return store


@dataclass
class Case:
    """An error, and what its message tells to do."""

    fail: Callable[[], object]
    remedy: str
    """What the message says."""
    follow: Callable[[], None]
    """Does that, and asserts that all values are those that were saved."""


def tensor(value: float = 0.0, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(value))


def equal(state: dict[str, Any], **values: float) -> None:
    for name, value in values.items():
        found = state[name]
        same = torch.equal(found, torch.full_like(found, value)) if name != "n" else found == value
        assert same, name


def renamed() -> Case:
    store = saved({"old": tensor(1)})
    state = {"new": tensor()}

    def follow() -> None:
        ckpt.load(state, store, rename={"new": "old"})
        equal(state, new=1)

    return Case(lambda: ckpt.load(state, store), "rename= says so", follow)


def new_parameter() -> Case:
    store = saved({"a": tensor(1), "n": 7})
    state: dict[str, Any] = {"a": tensor(), "b": tensor(5), "n": 0}

    def follow() -> None:
        report = ckpt.load(state, store, strict=False)
        equal(state, a=1, b=5, n=7)
        assert report.missing == ("b",)
        assert report.unexpected == ()

    return Case(lambda: ckpt.load(state, store), "strict=False loads all that was saved", follow)


def other_names_and_more() -> Case:
    store = saved({"a": tensor(1), "b": tensor(2)})
    state = {"a": tensor(), "c": tensor()}

    def follow() -> None:
        full = {"a": tensor(), "b": tensor()}
        ckpt.load(full, store)
        equal(full, a=1, b=2)

    return Case(
        lambda: ckpt.load(state, store), "give a state that has what was saved, too", follow
    )


def not_asked_for() -> Case:
    store = saved({"a": tensor(1), "opt": {"m": tensor(2)}})
    state = {"a": tensor()}

    def follow() -> None:
        full: dict[str, Any] = {"a": tensor(), "opt": {"m": tensor()}}
        ckpt.load(full, store)
        equal(full, a=1)
        equal(full["opt"], m=2)

    return Case(lambda: ckpt.load(state, store), "have it in the state, too", follow)


def all_but_that() -> Case:
    store = saved({"a": tensor(1), "opt": {"m": tensor(2)}})
    state = {"a": tensor()}

    def follow() -> None:
        ckpt.load(state, store, select=["a"])
        equal(state, a=1)

    return Case(lambda: ckpt.load(state, store), "select=['a']", follow)


def tied_head(*, tied: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(int(tied))
    net: Any = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    if tied:
        net[1].weight = net[0].weight
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    result = net(torch.tensor([1, 2]))
    result.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return result.detach()


def untied() -> Case:
    net, optimizer = tied_head(tied=True)
    step(net, optimizer)
    store = saved({"m": net, "o": optimizer})

    def fail() -> None:
        other, its = tied_head(tied=False)
        ckpt.load({"m": other, "o": its}, store)

    def follow() -> None:
        other, its = tied_head(tied=True)
        ckpt.load({"m": other, "o": its}, store)
        for _ in range(3):
            assert torch.equal(step(other, its), step(net, optimizer))

    return Case(fail, "have to be tied before the optimizer is made", follow)


def wider() -> Case:
    store = saved({"a": tensor(1.5).bfloat16()})
    state = {"a": tensor()}

    def follow() -> None:
        ckpt.load(state, store, dtype_policy="widen")
        equal(state, a=1.5)

    return Case(lambda: ckpt.load(state, store), 'pass dtype_policy="widen"', follow)


def narrower() -> Case:
    store = saved({"a": tensor(1 / 3)})

    def follow() -> None:
        state = {"a": torch.zeros(3)}
        ckpt.load(state, store)
        equal(state, a=1 / 3)

    return Case(
        lambda: ckpt.load({"a": torch.zeros(3).bfloat16()}, store),
        "give a destination of float32",
        follow,
    )


def pickled() -> Case:
    state = {"s": Fraction(1, 2)}

    def follow() -> None:
        got: dict[str, Any] = {"s": None}
        ckpt.load(got, saved(state, allow_pickle=True), allow_pickle=True)
        assert got == state

    return Case(lambda: saved(state), "allow_pickle=True at save and at load", follow)


class Color(enum.Enum):
    RED = 1


def of_an_enum() -> Case:
    state = {"c": Color.RED}

    def follow() -> None:
        ckpt.register_enum(Color)
        got: dict[str, Any] = {"c": None}
        ckpt.load(got, saved(state))
        assert got == state

    return Case(lambda: saved(state), "register_enum", follow)


def groups() -> Case:
    def make(*, one_group: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(3, 2)
        parts = [[net.weight, net.bias]] if one_group else [[net.weight], [net.bias]]
        given = [{"params": part, "lr": 0.1 * (n + 1)} for n, part in enumerate(parts)]
        return net, torch.optim.SGD(given, momentum=0.9)

    net, optimizer = make(one_group=False)
    store = saved({"m": net, "o": optimizer})

    def fail() -> None:
        other, its = make(one_group=True)
        ckpt.load({"m": other, "o": its}, store)

    def follow() -> None:
        other, its = make(one_group=False)
        for group in its.param_groups:
            group["lr"] = 9.0
        ckpt.load({"m": other, "o": its}, store)
        assert [group["lr"] for group in its.param_groups] == [0.1, 0.2]

    return Case(fail, "Group the parameters as they were", follow)


def numbered_state() -> Case:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    store = saved({"m": net, "o": optimizer})
    other = nn.Linear(3, 2)
    its = torch.optim.AdamW(other.parameters())

    def follow() -> None:
        ckpt.load({"m": other, "o": its}, store)
        for mine, theirs in zip(its.state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)

    return Case(
        lambda: ckpt.load({"m": other, "o": its.state_dict()}, store),
        "give the optimizer itself, with its module beside it",
        follow,
    )


def on_meta() -> Case:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("scale", torch.arange(2.0), persistent=False)

    with torch.device("meta"):
        without = Net()

    def follow() -> None:
        net = Net()
        store = saved({"m": net})
        other = Net()
        ckpt.load({"m": other}, store)
        assert all(torch.equal(a, b) for a, b in zip(other.buffers(), net.buffers(), strict=True))
        assert torch.equal(other.weight, net.weight)
        ckpt.load({"m": without}, store)
        assert torch.equal(ckpt.open(saved({"m": without}))["m/weight"][...], net.weight)

    return Case(lambda: saved({"m": without}), "make the module on its device", follow)


def read_only_array() -> Case:
    store = saved({"a": np.arange(3.0)})
    array = np.zeros(3)
    array.flags.writeable = False

    def follow() -> None:
        state = {"a": np.zeros(3)}
        ckpt.load(state, store)
        assert state["a"].tolist() == [0, 1, 2]

    return Case(lambda: ckpt.load({"a": array}, store), "give a fresh one", follow)


def overlapping() -> Case:
    store = saved({"a": torch.arange(3.0)})
    expanded = torch.zeros(1).expand(3)

    def follow() -> None:
        state = {"a": expanded.clone()}
        ckpt.load(state, store)
        assert state["a"].tolist() == [0, 1, 2]

    return Case(lambda: ckpt.load({"a": expanded}, store), "clone it", follow)


def sharing() -> Case:
    store = saved({"a": tensor(1), "b": tensor(2)})
    one = tensor()

    def follow() -> None:
        state = {"a": one, "b": one.clone()}
        ckpt.load(state, store)
        equal(state, a=1, b=2)

    return Case(lambda: ckpt.load({"a": one, "b": one}, store), "Untie them", follow)


def occupied() -> Case:
    store = saved({"a": tensor(1)})

    def follow() -> None:
        ckpt.save({"a": tensor(2)}, store, overwrite=True)
        assert ckpt.open(store)["a"][...].tolist() == [2, 2, 2]

    return Case(lambda: ckpt.save({"a": tensor(2)}, store), "overwrite=True", follow)


def shared_value_for_per_rank() -> Case:
    store = saved({"n": 3})

    def follow() -> None:
        state = {"n": 0}
        ckpt.load(state, store)
        assert state["n"] == 3

    return Case(lambda: ckpt.load({"n": ckpt.PerRank(0)}, store), "give the value itself", follow)


def per_rank_for_a_value() -> Case:
    store = saved({"n": ckpt.PerRank(3)})

    def follow() -> None:
        state = {"n": ckpt.PerRank(0)}
        ckpt.load(state, store)
        assert state["n"].value == 3

    return Case(lambda: ckpt.load({"n": 0}, store), "wrap the destination in PerRank", follow)


def bare_value() -> Case:
    store = saved({"a": tensor(1)})

    def follow() -> None:
        state = {"a": tensor()}
        ckpt.load(state, store)
        equal(state, a=1)

    return Case(lambda: ckpt.load([tensor()], store), "wrap other things in a dict", follow)  # pyright: ignore


CASES = [
    renamed,
    new_parameter,
    other_names_and_more,
    not_asked_for,
    all_but_that,
    untied,
    wider,
    narrower,
    pickled,
    of_an_enum,
    groups,
    numbered_state,
    on_meta,
    read_only_array,
    overlapping,
    sharing,
    occupied,
    shared_value_for_per_rank,
    per_rank_for_a_value,
    bare_value,
]


@pytest.mark.parametrize("make", CASES)
def test_the_remedy_of_an_error_loses_nothing(make: Callable[[], Case]) -> None:
    case = make()
    with pytest.raises(CheckpointError) as failure:
        case.fail()
    message = str(failure.value)
    assert case.remedy in message, message
    assert "to_empty" not in message
    case.follow()


def on_ranks(
    size: int, store: MemoryStore, call: Callable[..., Any], give: Callable[[int], dict[str, Any]]
) -> list[Any]:
    """Save or load on ranks; return what each rank's state became, or the error."""

    def body(rank: int, group: Any) -> Any:
        state = give(rank)
        try:
            call(state, store, process_group=group)
        except LayoutMismatch as error:
            return str(error)
        return {k: v.value if hasattr(v, "value") else v for k, v in state.items()}

    return run_ranks(size, body)


@pytest.mark.parametrize("value", [int, tensor])
def test_values_that_differ_are_saved_as_each_rank_has_them(value: Callable[[int], Any]) -> None:
    store = MemoryStore()
    errors = on_ranks(2, store, ckpt.save, lambda rank: {"v": value(rank)})
    assert len(set(errors)) == 1
    assert "PerRank" in errors[0]
    assert "PerCoordinate" in errors[0]
    on_ranks(2, store, ckpt.save, lambda rank: {"v": ckpt.PerRank(value(rank + 1))})
    found = on_ranks(2, store, ckpt.load, lambda _: {"v": ckpt.PerRank(value(0))})
    for rank, state in enumerate(found):
        wanted = value(rank + 1)
        assert torch.equal(torch.as_tensor(state["v"]), torch.as_tensor(wanted))


def test_values_of_new_ranks() -> None:
    store = MemoryStore()
    on_ranks(2, store, ckpt.save, lambda rank: {"v": ckpt.PerRank(rank + 5)})
    errors = on_ranks(3, store, ckpt.load, lambda rank: {"v": ckpt.PerRank(rank)})
    assert all('new_rank="keep"' in error for error in errors)
    assert all("PerCoordinate(value, axes=())" in error for error in errors)
    found = on_ranks(3, store, ckpt.load, lambda rank: {"v": ckpt.PerRank(rank, new_rank="keep")})
    assert [state["v"] for state in found] == [5, 6, 2]
    # What all ranks share, of any number of ranks.
    store = MemoryStore()
    on_ranks(2, store, ckpt.save, lambda _: {"v": ckpt.PerCoordinate(7, axes=())})
    found = on_ranks(3, store, ckpt.load, lambda _: {"v": ckpt.PerCoordinate(0, axes=())})
    assert [state["v"] for state in found] == [7, 7, 7]


def test_values_of_other_coordinates() -> None:
    store = MemoryStore()
    on_ranks(2, store, ckpt.save, lambda rank: {"v": ckpt.PerCoordinate(rank + 1)})
    errors = on_ranks(3, store, ckpt.load, lambda _: {"v": ckpt.PerCoordinate(0)})
    assert all("resize=" in error for error in errors)

    def spread(values: Any, _dealing: Any) -> int:
        return sum(values.values())

    found = on_ranks(3, store, ckpt.load, lambda _: {"v": ckpt.PerCoordinate(0, resize=spread)})
    assert [state["v"] for state in found] == [3, 3, 3]
