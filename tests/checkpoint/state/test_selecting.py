"""Loading a part of a checkpoint, and loading under other names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.state.names import key_component
from dtckpt.checkpoint.state.renaming import Renaming
from dtckpt.checkpoint.state.selecting import Selection
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import run_ranks
from ..test_together import same_error


def saved(state: dict[str, Any]) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return store


def filled(value: float) -> dict[str, Any]:
    """A state of some depth with one value all over."""
    return {
        "model": {"a.weight": torch.full((3,), value), "a.bias": torch.full((2,), value)},
        "head": (torch.full((2,), value), value),
        "step": value,
        "lists": [value, [value, value]],
    }


def values(state: Any) -> Any:
    """A state with the values of its tensors."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: values(item) for key, item in state.items()}  # pyright: ignore
    if isinstance(state, list | tuple):
        return type(state)(values(item) for item in state)  # pyright: ignore
    return state


@pytest.mark.parametrize(
    ("patterns", "names", "expected"),
    [
        (["model"], ["model", "model/w", "model2", "a/model"], ["model", "model/w"]),
        (["model/"], ["model/w", "model"], ["model/w", "model"]),
        (["*.bias"], ["m/a.bias", "m/a.bias/x", "bias", ".bias"], ["m/a.bias", "m/a.bias/x"]),
        (["model/layers.?"], ["model/layers.1", "model/layers.12"], ["model/layers.1"]),
        (["a", "b/*"], ["a", "b", "b/c/d"], ["a", "b/c/d"]),
        (["x.y"], ["xzy", "x.y"], ["x.y"]),
    ],
)
def test_what_patterns_select(patterns: list[str], names: list[str], expected: list[str]) -> None:
    found = [name for name in names if name in Selection(patterns)]
    assert [name for name in found if name != ".bias"] == expected


def test_what_cannot_be_reached_is_known() -> None:
    selection = Selection(["model/layers.*/w", "opt"])
    reached = ["", "model", "model/layers.1", "opt", "opt/state"]
    assert all(selection.may_reach(name) for name in reached)
    assert not any(selection.may_reach(name) for name in ["mod", "model/head", "opt2", "o"])


@pytest.mark.parametrize("strict", [True, False])
def test_only_what_is_selected_changes(strict: bool) -> None:
    store = saved(filled(1.0))
    state = filled(0.0) | {"extra": torch.zeros(1)}
    del state["step"]
    report = dcp.load(state, store, select=["*.bias", "head/1", "lists/1"], strict=strict)
    assert values(state) == {
        "model": {"a.weight": [0.0] * 3, "a.bias": [1.0] * 2},
        "head": ([0.0] * 2, 1.0),
        "lists": [0.0, [1.0, 1.0]],
        "extra": [0.0],
    }
    assert set(report.loaded) == {"model/a.bias", "head/1", "lists/1/0", "lists/1/1"}
    assert report.missing == report.unexpected == ()
    assert report.bytes_needed == report.bytes_read == 8


def test_strict_is_about_the_selected_part() -> None:
    store = saved(filled(1.0))
    with pytest.raises(LayoutMismatch, match=r"not asked for: head/0, head/1\."):
        dcp.load({"model": {"a.weight": torch.zeros(3)}}, store, select=["head", "*.weight"])
    into: dict[str, Any] = {
        "head": {"0": 1},
        "model": {"a.weight": torch.zeros(3), "b.weight": torch.zeros(3)},
    }
    with pytest.raises(LayoutMismatch, match=r"Missing in the checkpoint: model/b.weight\. "):
        dcp.load(into, store, select="model/*.weight")
    assert into["model"]["a.weight"].tolist() == [0] * 3
    report = dcp.load(into, store, select="model/*.weight", strict=False)
    assert into["model"]["a.weight"].tolist() == [1] * 3
    assert report.missing == ("model/b.weight",)


@pytest.mark.parametrize(
    ("select", "told"),
    [
        ("modle", "select='modle' selects nothing; did you mean 'model'"),
        (["step", "model/a.wieght"], "select='model/a.wieght' selects nothing.*'model/a.weight'"),
        ([], "select=an empty list selects nothing"),
    ],
)
def test_patterns_that_select_nothing_are_errors(select: Any, told: str) -> None:
    store = saved(filled(1.0))

    def load(_: int, group: Any) -> None:
        state = filled(0.0)
        try:
            dcp.load(state, store, select=select, process_group=group)
        finally:
            assert values(state) == values(filled(0.0))

    error = same_error(load)
    assert isinstance(error, LayoutMismatch)
    with pytest.raises(LayoutMismatch, match=told):
        raise error


def test_a_value_that_is_selected_in_part_is_refused() -> None:
    store = saved({"config": {"lr": 1, "wd": 2}})
    with pytest.raises(LayoutMismatch, match="only a part of it is selected, but int has no parts"):
        dcp.load({"config": 0}, store, select="config/lr")


class Component:
    """Something with a state that counts who asks for it."""

    def __init__(self, value: float) -> None:
        self.state: dict[str, Any] = {"t": torch.full((2,), value), "n": value}
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        self.calls.append("state_dict")
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        self.calls.append("load_state_dict")
        self.state = state_dict


def test_objects_that_are_not_selected_are_left_alone() -> None:
    store = saved({"one": Component(1.0), "two": Component(1.0), "three": Component(1.0)})
    parts = {name: Component(0.0) for name in ("one", "two", "three")}
    dcp.load(dict(parts), store, select=["one", "three/n"])
    assert values(parts["one"].state) == {"t": [1.0, 1.0], "n": 1.0}
    assert parts["two"].calls == []
    assert values(parts["three"].state) == {"t": [0.0, 0.0], "n": 1.0}


def model() -> nn.Linear:
    """A small model with the same start each time."""
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def trained() -> tuple[nn.Linear, torch.optim.AdamW]:
    """A model after two steps."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return net, optimizer


def test_a_part_of_a_module_and_of_its_optimizer() -> None:
    net, optimizer = trained()
    store = saved({"net": net, "opt": optimizer})
    fresh = model()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    before = fresh.weight.detach().clone()
    select = ["net/bias", "opt/state/net/bias"]
    dcp.load({"net": fresh, "opt": other}, store, select=select)
    assert torch.equal(fresh.weight, before)
    assert torch.equal(fresh.bias, net.bias)
    assert list(other.state) == [fresh.bias], "nothing uninitialised for the other parameter"
    assert torch.equal(other.state[fresh.bias]["exp_avg"], optimizer.state[net.bias]["exp_avg"])
    assert other.param_groups[0]["lr"] == 0.1
    fresh(torch.ones(1, 3)).sum().backward()
    other.step()  # state of all parameters is as the optimizer expects it


def test_the_groups_of_an_optimizer_without_its_state() -> None:
    _, optimizer = trained()
    other = torch.optim.AdamW(model().parameters(), lr=0.1)
    dcp.load({"opt": other}, saved({"opt": optimizer}), select="opt/param_groups")
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.state


def test_state_of_a_used_optimizer_that_is_not_selected_stays() -> None:
    _, optimizer = trained()
    net, used = trained()
    for state in used.state.values():
        state["exp_avg"].fill_(7)
        state["exp_avg_sq"].fill_(7)
    dcp.load({"opt": used}, saved({"opt": optimizer}), select="opt/state/*/exp_avg_sq")
    assert (used.state[net.weight]["exp_avg"] == 7).all()
    assert (used.state[net.weight]["exp_avg_sq"] != 7).all()


def test_half_a_state_is_not_given_to_a_fresh_optimizer() -> None:
    _, optimizer = trained()
    other = torch.optim.AdamW(model().parameters())
    with pytest.raises(LayoutMismatch, match=r"opt/state/#0: the optimizer has no opt/.*step yet"):
        dcp.load({"opt": other}, saved({"opt": optimizer}), select="opt/state/*/exp_avg*")
    assert not other.state


def test_values_of_each_rank_can_be_selected() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        dcp.save({"seed": dcp.PerRank(rank + 1), "n": 5}, store, process_group=group)

    def load(_: int, group: Any) -> Any:
        state: dict[str, Any] = {"seed": dcp.PerRank(0), "n": 0}
        dcp.load(state, store, process_group=group, select="seed")
        return state["seed"].value, state["n"]

    run_ranks(2, save)
    assert run_ranks(2, load) == [(1, 0), (2, 0)]


def model_to_ema(name: str) -> str:
    """Rename by a function."""
    return name.replace("model/", "ema/")


@pytest.mark.parametrize(
    "rename",
    [
        {"model": "ema"},
        {"model/": "ema/"},
        {"model/w": "ema/w", "model/inner": "ema/inner"},
        model_to_ema,
    ],
    ids=["prefix", "slash", "leaves", "function"],
)
def test_renamed(rename: Any) -> None:
    store = saved({"ema": {"w": torch.ones(2), "inner": [torch.ones(1), 1]}, "step": 1})
    state = {"model": {"w": torch.zeros(2), "inner": [torch.zeros(1), 0]}, "step": 0}
    report = dcp.load(state, store, rename=rename)
    assert values(state) == {"model": {"w": [1, 1], "inner": [[1], 1]}, "step": 1}
    assert set(report.loaded) == {"ema/w", "ema/inner/0", "ema/inner/1", "step"}


def test_the_root_is_renamed_too() -> None:
    net = model()
    flat = saved(dict(net.state_dict()))
    fresh = nn.Linear(3, 2)
    dcp.load({"model": fresh}, flat, rename={"model": ""})
    assert torch.equal(fresh.weight, net.weight)
    deep = saved({"run": {"model": net, "step": 3}})
    other = nn.Linear(3, 2)
    dcp.load(other.state_dict(), deep, rename={"": "run/model"}, select="run/model")
    assert torch.equal(other.bias, net.bias)


def test_fresh_optimizers_are_filled_under_another_name() -> None:
    net, optimizer = trained()
    store = saved({"optimizer": optimizer})

    def renamed(name: str) -> str:
        return name.replace("opt/", "optimizer/")

    for rename in ({"opt": "optimizer"}, renamed):
        fresh = model()
        other = torch.optim.AdamW(fresh.parameters())
        dcp.load({"opt": other}, store, rename=rename)
        assert other.param_groups[0]["lr"] == 0.5
        kept = optimizer.state[net.weight]["exp_avg_sq"]
        assert torch.equal(other.state[fresh.weight]["exp_avg_sq"], kept)


def test_no_uninitialised_state_where_renaming_goes_inside_of_an_optimizer() -> None:
    _, optimizer = trained()
    other = torch.optim.AdamW(model().parameters())

    def rename(name: str) -> str:
        return name.replace("exp_avg_sq", "variance")

    with pytest.raises(LayoutMismatch, match="has no such state yet, and the load would not fill"):
        dcp.load({"opt": other}, saved({"opt": optimizer}), rename=rename, strict=False)
    assert not other.state


def no_name(_: str) -> Any:
    """A function that forgets to return a name."""


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        ({"b": "a"}, "a: wanted twice, the second time as b"),
        ({"n": "m"}, "m: wanted twice, the second time as n"),
        ({"a": "gone"}, r"Missing in the checkpoint: gone \(a in the state\)"),
        ({"typo": "a"}, "rename= has the keys typo, which are no names"),
        ({"a": "b", "a/": "m"}, "rename= gives two names for 'a'"),
        (no_name, "returned None, expected a str"),
    ],
)
def test_renaming_that_cannot_be_meant_is_refused(rename: Any, told: str) -> None:
    store = saved({"a": torch.ones(1), "b": torch.ones(1), "m": 1, "n": 1})

    def load(_: int, group: Any) -> None:
        state = {"a": torch.zeros(1), "b": torch.zeros(1), "m": 0, "n": 0}
        try:
            dcp.load(state, store, rename=rename, process_group=group)
        finally:
            assert values(state) == {"a": [0], "b": [0], "m": 0, "n": 0}

    error = same_error(load)
    with pytest.raises(LayoutMismatch, match=told):
        raise error


def test_keys_that_only_some_ranks_have_are_no_typos() -> None:
    store = saved({"x0": 1, "x1": 1})

    def load(rank: int, group: Any) -> Any:
        state = {f"y{rank}": 0}
        dcp.load(state, store, process_group=group, rename={"y0": "x0", "y1": "x1"})
        return state

    assert run_ranks(2, load) == [{"y0": 1}, {"y1": 1}]


def test_renaming_is_total() -> None:
    rename: dict[str, str] = {"": "all", "a/b": "x", "a": "y"}
    renaming: Callable[[str], str] = Renaming(rename)
    assert [renaming(n) for n in ("", "a", "a/b", "a/b/c", "a/c", "d", "ab")] == [
        "all",
        "y",
        "x",
        "x/c",
        "y/c",
        "all/d",
        "all/ab",
    ]


keys = st.one_of(st.sampled_from(["a", "b.c", "a/b", "[x]", "*", "#1", ""]), st.integers(0, 3))


def trees(depth: int) -> st.SearchStrategy[Any]:
    """States of tensors and values in dicts, lists and tuples, never empty."""
    leaves = st.sampled_from(["tensor", "value"])
    if depth == 0:
        return leaves
    inner = trees(depth - 1)
    dicts = st.dictionaries(keys, inner, min_size=1, max_size=3)
    lists = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(leaves, dicts, lists, lists.map(tuple))


def built(tree: Any, name: str, leaf: Callable[[str], Any]) -> Any:
    """A state of the form of ``tree`` with ``leaf(name)`` everywhere."""
    if isinstance(tree, dict):
        parts: dict[Any, Any] = tree
        return {k: built(v, f"{name}/{key_component(k)}", leaf) for k, v in parts.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(built(v, f"{name}/{i}", leaf) for i, v in enumerate(tree))  # pyright: ignore
    found = leaf(name.lstrip("/"))
    return torch.tensor([found]) if tree == "tensor" else found


@settings(max_examples=150, deadline=None)
@given(st.data(), st.dictionaries(keys, trees(2), min_size=1, max_size=3))
def test_any_part_of_any_state(data: st.DataObject, tree: dict[Any, Any]) -> None:
    names: list[str] = []
    numbers = itertools.count(1)
    number_of: dict[str, int] = {}

    def number(name: str) -> int:
        names.append(name)
        return number_of.setdefault(name, next(numbers))

    store = saved(built(tree, "", number))
    parts = sorted(
        {"/".join(n.split("/")[: i + 1]) for n in names for i in range(n.count("/") + 1)}
    )
    chosen = data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3))
    escaped = [re.sub(r"([*?\[])", r"[\1]", name) for name in chosen]
    state = built(tree, "", lambda _: 0)
    report = dcp.load(state, store, select=escaped)

    def expected(name: str) -> int:
        is_chosen = any(name == part or name.startswith(f"{part}/") for part in chosen)
        return number_of[name] if is_chosen else 0

    assert values(state) == values(built(tree, "", expected))
    assert set(report.loaded) == {name for name in names if expected(name)}


def test_who_loads_a_part_is_told_how() -> None:
    """By select=, under which all of that part has to be there; not by leaving out what differs."""
    store = saved({"net": {"a": torch.ones(2), "b": torch.ones(2)}, "opt": {"x": 1, "y": 2}})
    with pytest.raises(LayoutMismatch, match=r"select=\['net', 'opt/x'\]") as failure:
        dcp.load({"net": {"a": torch.zeros(2), "b": torch.zeros(2)}, "opt": {"x": 0}}, store)
    assert "strict=False" not in str(failure.value)
    with pytest.raises(LayoutMismatch, match=r"rename=.*select=.*strict=False"):
        dcp.load({"model": {"a": torch.zeros(2)}}, store)


def test_a_report_of_many_names_is_short() -> None:
    state = {f"w{i}": torch.zeros(1) for i in range(1000)}
    report = dcp.load(state | {"more": 1}, saved(state | {"less": 1}), strict=False)
    for text in (str(report), repr(report)):
        assert len(text) < 500
        assert all(word in text for word in ("1000 tensors", "more", "less"))
