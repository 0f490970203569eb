"""State of optimizers goes to the parameters it was saved for, however these are numbered now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dtckpt.checkpoint as dcp
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks

Groups = list[dict[str, Any]]


def twins(seed: int = 0, layers: int = 2) -> nn.Sequential:
    """Layers of one shape, so that nothing but names tells their parameters apart."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))


def weights(net: nn.Sequential) -> list[nn.Parameter]:
    """The weights of its layers."""
    return [param for layer in net for param in layer.parameters()]


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Some steps that give each parameter other moments."""
    for step in range(steps):
        for number, param in enumerate(net.parameters()):
            param.grad = torch.full_like(param, number + 1.0 + step)
        optimizer.step()


def moments(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> float:
    """What tells whose moments a parameter has."""
    return float(optimizer.state[param]["exp_avg"].flatten()[0])


def assert_same_moments(
    net: nn.Module, optimizer: Any, other_net: nn.Module, other: torch.optim.Optimizer
) -> None:
    """Every parameter of the other module has the moments of its namesake."""
    others = dict(other_net.named_parameters())
    compared = 0
    for name, param in net.named_parameters():
        if param in optimizer.state and name in others:
            found = other.state[others[name]]
            for key, value in optimizer.state[param].items():
                assert torch.equal(found[key], value), (name, key)
                compared += 1
    assert compared


def saved(state: dict[str, Any]) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return store


def test_names_are_those_of_the_parameters() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    checkpoint = dcp.open(saved({"model": net, "optimizer": optimizer}))
    assert {name for name in checkpoint if name.endswith("exp_avg")} == {
        "optimizer/state/model/0.weight/exp_avg",
        "optimizer/state/model/1.weight/exp_avg",
    }
    tree = checkpoint.state_dict()["optimizer"]
    assert tree["param_groups"][0]["params"] == ["model/0.weight", "model/1.weight"]
    assert torch.equal(
        tree["state"]["model"]["0.weight"]["exp_avg"][...],
        optimizer.state[weights(net)[0]]["exp_avg"],
    )


Pick = Callable[[nn.Sequential], Any]
BESIDE: dict[str, Callable[[nn.Sequential, Any], dict[str, Any]]] = {
    "module": lambda net, opt: {"net": net, "opt": opt},
    "its state dict": lambda net, opt: {"net": net.state_dict(), "opt": opt},
    "after it": lambda net, opt: {"a": {"opt": opt}, "net": [net]},
    "at the root": lambda net, opt: {**net.state_dict(), "opt": opt},
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE.keys())
def test_an_optimizer_in_another_order(beside: Any, used: bool) -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved(beside(net, optimizer))
    fresh = twins(1)
    other = torch.optim.Adam(reversed(weights(fresh)))
    if used:
        trained(fresh, other, 1)
    report = dcp.load(beside(fresh, other), store)
    assert_same_moments(net, optimizer, fresh, other)
    assert report.by_position == ()


def test_names_that_the_optimizer_was_given() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.named_parameters())
    trained(net, optimizer)
    store = saved({"opt": optimizer})
    assert "opt/state/0.weight/exp_avg" in dcp.open(store)
    fresh = twins(1)
    other = torch.optim.Adam(reversed(list(fresh.named_parameters())))
    assert dcp.load({"opt": other}, store).by_position == ()
    assert_same_moments(net, optimizer, fresh, other)
    assert other.param_groups[0]["param_names"] == ["1.weight", "0.weight"]


def test_given_names_and_those_of_the_module_are_compared() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.named_parameters())
    trained(net, optimizer)
    for state in ({"opt": optimizer}, {"model": net, "opt": optimizer}):
        store = saved(state)
        fresh = twins(1)
        other = torch.optim.Adam(reversed(list(fresh.named_parameters())))
        assert dcp.load({"opt": other}, store, select="opt").by_position == ()
        assert_same_moments(net, optimizer, fresh, other)
        fresh = twins(1)
        other = torch.optim.Adam(reversed(weights(fresh)))
        into = {"x": fresh, "opt": other}
        if "model" in state:  # a module of another name has other parameters
            with pytest.raises(LayoutMismatch, match=r"Missing .*: opt/state/x/1.weight, opt/st"):
                dcp.load(into, store, select="opt")
            dcp.load(into, store, select="opt", rename={"x": "model"})
        else:
            dcp.load(into, store, select="opt")
        assert_same_moments(net, optimizer, fresh, other)


def test_dicts_that_go_by_name() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    trained(net, optimizer)
    store = saved({"model": net, "opt": get_optimizer_state_dict(net, optimizer)})
    fresh = twins(1)
    other = torch.optim.Adam(reversed(weights(fresh)))
    assert dcp.load({"model": fresh, "opt": other}, store).by_position == ()
    assert_same_moments(net, optimizer, fresh, other)
    assert other.param_groups[0]["lr"] == 0.5


def test_another_layer_is_frozen() -> None:
    net = twins(layers=3)
    weights(net)[0].requires_grad_(False)
    optimizer = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})
    fresh = twins(1, layers=3)
    weights(fresh)[1].requires_grad_(False)
    other = torch.optim.Adam(p for p in fresh.parameters() if p.requires_grad)
    state = {"model": fresh, "opt": other}
    with pytest.raises(LayoutMismatch) as error:
        dcp.load(state, store)
    assert "Missing in the checkpoint: opt/state/model/0.weight." in str(error.value)
    assert "not asked for: opt/state/model/1.weight/step" in str(error.value)
    assert not other.state
    report = dcp.load(state, store, strict=False)
    assert list(other.state) == [weights(fresh)[2]]
    assert moments(other, weights(fresh)[2]) == moments(optimizer, weights(net)[2])
    assert report.missing == ("opt/state/model/0.weight",)
    assert set(report.unexpected) == {
        f"opt/state/model/1.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    }


def grouped(net: nn.Sequential, order: Iterable[tuple[float, list[int]]]) -> torch.optim.Adam:
    """An optimizer with groups of (rate, layers)."""
    groups: Groups = [
        {"params": [weights(net)[i] for i in layers], "lr": rate} for rate, layers in order
    ]
    return torch.optim.Adam(groups)


def rates(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
    """The rate of every layer."""
    of_param = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    return [of_param[id(weight)] for weight in weights(net)]


@pytest.mark.parametrize(
    "order",
    [
        [(9.0, [2]), (8.0, [1, 0])],
        [(9.0, [1]), (8.0, [0]), (7.0, [2])],
        [(9.0, [0, 1]), (8.0, []), (7.0, [2])],
    ],
    ids=["reordered", "split", "an empty one"],
)
def test_settings_follow_the_parameters(order: Any) -> None:
    net = twins(layers=3)
    optimizer = grouped(net, [(0.1, [0, 1]), (0.2, [2])])
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})
    fresh = twins(1, layers=3)
    other = grouped(fresh, order)
    dcp.load({"model": fresh, "opt": other}, store)
    assert rates(fresh, other) == [0.1, 0.1, 0.2]
    assert_same_moments(net, optimizer, fresh, other)


def test_groups_become_one_only_if_their_settings_are_the_same() -> None:
    net = twins(layers=3)
    optimizer = grouped(net, [(0.1, [0]), (0.1, [1]), (0.2, [2])])
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})
    fresh = twins(1, layers=3)
    other = grouped(fresh, [(9.0, [0, 1]), (8.0, [2])])
    dcp.load({"model": fresh, "opt": other}, store)
    assert rates(fresh, other) == [0.1, 0.1, 0.2]
    wrong = grouped(fresh, [(9.0, [0]), (8.0, [1, 2])])
    with pytest.raises(LayoutMismatch, match=r"saved with other lr: model/1.weight is of opt/par"):
        dcp.load({"model": fresh, "opt": wrong}, store)
    assert not wrong.state
    dcp.load({"model": fresh, "opt": wrong}, store, select=["model", "opt/state"])
    assert_same_moments(net, optimizer, fresh, wrong)


def test_rates_that_are_tensors_follow_too() -> None:
    net = twins(layers=3)
    optimizer = grouped(net, [(0.1, [0, 1]), (0.2, [2])])
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})
    fresh = twins(1, layers=3)
    other = grouped(fresh, [(9.0, [0]), (8.0, [2]), (7.0, [1])])
    for group in other.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    dcp.load({"model": fresh, "opt": other}, store)
    assert [float(rate) for rate in rates(fresh, other)] == pytest.approx([0.1, 0.1, 0.2])
    first, third = (other.param_groups[i]["lr"] for i in (0, 2))
    assert first is not third


def test_schedulers_of_groups_that_moved_are_refused() -> None:
    net = twins(layers=3)
    optimizer = grouped(net, [(0.1, [0, 1]), (0.2, [2])])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    store = saved({"model": net, "opt": optimizer, "rate": scheduler})
    for order in ([(9.0, [2]), (8.0, [0, 1])], [(9.0, [0]), (8.0, [1]), (7.0, [2])]):
        fresh = twins(1, layers=3)
        other = grouped(fresh, order)
        moved = torch.optim.lr_scheduler.StepLR(other, 1)
        before = copy.deepcopy(moved.state_dict())
        with pytest.raises(LayoutMismatch, match="rate: the scheduler was saved with rates for"):
            dcp.load({"model": fresh, "opt": other, "rate": moved}, store)
        assert moved.state_dict() == before
        dcp.load({"model": fresh, "opt": other}, store, select=["model", "opt"])
        assert rates(fresh, other) == [0.1, 0.1, 0.2]


def test_several_modules_and_several_optimizers() -> None:
    """Modules whose parameters have the same names inside of them."""

    def make(seed: int) -> tuple[dict[str, Any], dict[str, torch.optim.Optimizer]]:
        nets = {"gen": twins(seed), "disc": twins(seed + 1), "enc": twins(seed + 2)}
        both = [*weights(nets["gen"]), *weights(nets["disc"])]
        if seed:
            both.reverse()
        optimizers: dict[str, torch.optim.Optimizer] = {
            "both": torch.optim.Adam(both),
            "part": torch.optim.Adam([weights(nets["enc"])[1]]),
            "rest": torch.optim.Adam([weights(nets["enc"])[0]]),
        }
        return {"nets": nets, "optimizers": optimizers}, optimizers

    state, optimizers = make(0)
    for number, (optimizer, net) in enumerate(
        [("both", "gen"), ("both", "disc"), ("part", "enc"), ("rest", "enc")]
    ):
        trained(state["nets"][net], optimizers[optimizer], 1 + number)
    store = saved(state)
    into, others = make(10)
    assert dcp.load(into, store).by_position == ()
    for optimizer, net in [("both", "gen"), ("both", "disc"), ("part", "enc"), ("rest", "enc")]:
        nets = state["nets"][net], into["nets"][net]
        assert_same_moments(nets[0], optimizers[optimizer], nets[1], others[optimizer])


class Tied(nn.Module):
    """Two names for one parameter, registered in either order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        parts = {name: nn.Linear(4, 4, bias=False) for name in ("embed", "head", "other")}
        parts["head"].weight = parts["embed"].weight
        for letter in order:
            name = next(name for name in parts if name.startswith(letter))
            self.add_module(name, parts[name])


def test_tied_parameters() -> None:
    net = Tied("eho")
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})
    for order in ("eho", "ohe", "heo"):
        fresh = Tied(order)
        other = torch.optim.Adam(fresh.parameters())
        assert dcp.load({"model": fresh, "opt": other}, store).by_position == ()
        assert_same_moments(net, optimizer, fresh, other)


def wrapped(net: nn.Module, kind: str) -> nn.Module:
    """A module as wrappers have it: theirs are its parameters, with a prefix."""
    for prefix in kind.split():
        outer = nn.Module()
        outer.add_module(prefix, net)
        net = outer
    return net


@pytest.mark.parametrize("before", ["", "module", "_orig_mod", "module _orig_mod"])
@pytest.mark.parametrize("after", ["", "_orig_mod module"])
def test_wrappers_do_not_count(before: str, after: str) -> None:
    net = twins()
    outer = wrapped(net, before)
    optimizer = torch.optim.Adam(outer.parameters())
    trained(net, optimizer)
    store = saved({"model": outer, "opt": optimizer})
    assert "opt/state/model/1.weight/exp_avg" in dcp.open(store)
    fresh = twins(1)
    other = torch.optim.Adam(reversed(weights(fresh)))
    state = {"model": wrapped(fresh, after), "opt": other}
    assert dcp.load(state, store, select="opt").by_position == ()
    assert_same_moments(net, optimizer, fresh, other)


def test_parts_called_module_are_told_apart() -> None:
    """Without what wrappers add, these parameters would have one name."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4, bias=False)
            self.weight = nn.Parameter(torch.ones(4, 4))

    net = Two()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})
    fresh = Two()
    other = torch.optim.Adam([fresh.module.weight, fresh.weight])
    dcp.load({"model": fresh, "opt": other}, store)
    assert_same_moments(net, optimizer, fresh, other)


def test_compiled_modules() -> None:
    net = twins()
    compiled = wrapped(net, "_orig_mod")
    optimizer = torch.optim.Adam(compiled.parameters())
    trained(net, optimizer)
    store = saved({"model": compiled, "opt": optimizer})
    fresh = twins(1)
    other = torch.optim.Adam(reversed(weights(fresh)))

    def compiled_name(name: str) -> str:
        return name.replace("model/", "model/_orig_mod.")

    dcp.load({"model": fresh, "opt": other}, store, rename=compiled_name)
    assert torch.equal(weights(fresh)[0], weights(net)[0])
    assert_same_moments(net, optimizer, fresh, other)


def test_weights_from_elsewhere_and_moments_of_the_model() -> None:
    net, average = twins(), twins(5)
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"model": net, "ema": average, "opt": optimizer})
    fresh = twins(1)
    other = torch.optim.Adam(reversed(weights(fresh)))
    dcp.load({"model": fresh, "opt": other}, store, rename={"model": "ema"}, select=["ema", "opt"])
    assert torch.equal(weights(fresh)[0], weights(average)[0])
    assert_same_moments(net, optimizer, fresh, other)


@pytest.mark.parametrize("with_names", ["at load", "never"])
def test_where_nothing_tells_names_the_position_counts_and_is_reported(with_names: str) -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"opt": optimizer})
    fresh = twins(1)
    other = torch.optim.Adam(fresh.parameters())
    state = {"opt": other} | ({"model": fresh} if with_names == "at load" else {})
    report = dcp.load(state, store, select="opt")
    assert_same_moments(net, optimizer, fresh, other)
    assert report.by_position == ("opt/state/#0", "opt/state/#1")


def test_positions_are_checked_by_shapes_and_sizes_of_groups() -> None:
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))
    for make in (torch.optim.Adam, torch.optim.Adafactor, torch.optim.SGD):
        optimizer = make(net.parameters(), lr=0.1)
        trained(net, optimizer)
        for state in ({"opt": optimizer}, {"opt": optimizer, "model": net}):
            if make is torch.optim.SGD and "model" not in state:
                continue  # there is no state, and nothing else to compare
            store = saved(state)
            for params in (
                list(reversed(list(net.parameters()))),
                list(net.parameters())[:1],
                [{"params": [p]} for p in net.parameters()],
            ):
                fresh: Any = copy.deepcopy(params)
                other = make(fresh, lr=0.3)
                with pytest.raises(LayoutMismatch, match=r"nothing was loaded"):
                    dcp.load({"opt": other}, store, select="opt")
                assert not other.state
                assert other.param_groups[0]["lr"] == 0.3


def test_checkpoints_that_go_by_number_still_load() -> None:
    """As they were written before: numbers in the state and in the groups, perhaps with names."""
    net = twins()
    for given in (net.parameters(), net.named_parameters()):
        optimizer = torch.optim.Adam(given)
        trained(net, optimizer)
        store = saved({"model": net, "opt": optimizer.state_dict()})
        assert "opt/state/#1/exp_avg" in dcp.open(store)
        fresh = twins(1)
        named = "param_names" in optimizer.param_groups[0]
        order = reversed(weights(fresh)) if named else weights(fresh)
        other = torch.optim.Adam(order)
        report = dcp.load({"model": fresh, "opt": other}, store)
        assert_same_moments(net, optimizer, fresh, other)
        assert report.by_position == (() if named else ("opt/state/#0", "opt/state/#1"))


class Stage(nn.Module):
    """One stage of a pipeline: some layers under the names that they have in the whole."""

    def __init__(self, layers: Iterable[int], seed: int) -> None:
        super().__init__()
        for number in layers:
            torch.manual_seed(100 * seed + number)
            self.add_module(f"layers{number}", nn.Linear(4, 4, bias=False))


def two_rates(net: nn.Module) -> torch.optim.Adam:
    """An optimizer with a group of its own for the first layer of the whole."""
    named = dict(net.named_parameters())
    first = [p for n, p in named.items() if n.startswith("layers0")]
    groups: Groups = [
        {"params": [p for p in named.values() if not any(p is q for q in first)], "lr": 0.1},
        {"params": first, "lr": 0.2},
    ]
    return torch.optim.Adam([group for group in groups if group["params"]])


@pytest.mark.parametrize("apart", [False, True], ids=["one name", "names of their own"])
def test_stages_of_a_pipeline_do_not_collide(apart: bool) -> None:
    store = MemoryStore()
    stages = {0: [0, 1, 2], 1: [3, 4], 2: [5]}
    whole = Stage(range(6), 0)
    optimizer = two_rates(whole)
    trained(whole, optimizer)

    def of(rank: int, layers: Iterable[int], seed: int) -> tuple[dict[str, Any], Stage, Any]:
        net = Stage(layers, seed)  # the generator is that of all threads, no layer is on two ranks
        own = two_rates(net)
        return {f"stage{rank}" if apart else "model": net, "opt": own}, net, own

    def save(rank: int, group: Any) -> None:
        state, net, own = of(rank, stages[rank], 0)
        for name, param in net.named_parameters():
            theirs = optimizer.state[dict(whole.named_parameters())[name]]
            own.state[param] = {k: v.clone() for k, v in theirs.items()}
        dcp.save(state, store, process_group=group)

    run_ranks(3, save)
    names = {name for name in dcp.open(store) if name.endswith("exp_avg")}
    assert len(names) == 6

    def load(rank: int, group: Any, now: dict[int, list[int]]) -> None:
        state, net, own = of(rank, now[rank], 1)
        report = dcp.load(state, store, process_group=group)
        assert report.by_position == ()
        assert_same_moments(whole, optimizer, net, own)
        rate = {id(p): g["lr"] for g in own.param_groups for p in g["params"]}
        for name, param in net.named_parameters():
            assert rate[id(param)] == (0.2 if name.startswith("layers0") else 0.1)

    run_ranks(3, lambda rank, group: load(rank, group, stages))
    if not apart:
        now = {0: [5, 0, 4], 1: [1, 2, 3]}
        run_ranks(2, lambda rank, group: load(rank, group, now))


def test_settings_of_one_parameter_that_differ_between_ranks_are_refused() -> None:
    store = MemoryStore()

    start = twins()

    def save(rank: int, group: Any) -> None:
        net = copy.deepcopy(start)
        own = [torch.nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.Adam([*net.parameters(), *own], lr=0.1 * (1 + rank))
        state = {"model": net, f"extra{rank}": own[0], "opt": optimizer}
        dcp.save(state, store, process_group=group)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, save)
    for error in failed.value.errors.values():
        assert isinstance(error, LayoutMismatch)
        assert "model/0.weight has other settings on rank 0 than on rank 1: lr is 0.1" in str(error)


def test_state_that_is_not_of_a_parameter_and_parameters_in_no_module() -> None:
    net = twins()
    loose = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weights(net)[0], loose, weights(net)[1]])
    trained(net, optimizer)
    optimizer.state[loose] = {"step": torch.tensor(7.0), "exp_avg": torch.ones(3)}
    optimizer.state["global"] = {"count": 3}  # pyright: ignore[reportArgumentType]
    store = saved({"model": net, "opt": optimizer})
    assert {"opt/state/#1/exp_avg", "opt/state/model/0.weight/exp_avg"} < set(dcp.open(store))
    fresh = twins(1)
    free = nn.Parameter(torch.zeros(3))
    other = torch.optim.Adam([weights(fresh)[1], free, weights(fresh)[0]])
    other.state["global"] = {"count": 0}  # pyright: ignore[reportArgumentType]
    report = dcp.load({"model": fresh, "opt": other}, store)
    assert report.by_position == ("opt/state/#1",)
    assert other.state[free]["step"] == 7
    assert other.state["global"] == {"count": 3}  # pyright: ignore[reportArgumentType]
    assert_same_moments(net, optimizer, fresh, other)


def test_state_for_which_there_is_no_name_at_all_or_two() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.named_parameters())
    trained(net, optimizer)
    store = saved({"opt": optimizer})
    nets = {"a": twins(1), "b": twins(2)}
    both = torch.optim.Adam(weights(nets["a"]) + weights(nets["b"]))
    with pytest.raises(LayoutMismatch, match="more than one parameter may be this one"):
        dcp.load({**nets, "opt": both}, store, strict=False)
    assert not both.state


def test_what_a_rank_trains_for_itself() -> None:
    store = MemoryStore()

    def make(seed: int) -> tuple[Any, nn.Sequential, torch.optim.Optimizer]:
        net = twins(seed)
        order = weights(net) if seed < 10 else reversed(weights(net))
        optimizer = torch.optim.Adam(order)
        return {"own": dcp.PerRank({"net": net, "opt": optimizer})}, net, optimizer

    def run(rank: int, group: Any) -> None:
        state, net, optimizer = make(rank)
        trained(net, optimizer, rank + 1)
        dcp.save(state, store, process_group=group)
        into, fresh, other = make(10 + rank)
        assert dcp.load(into, store, process_group=group).by_position == ()
        assert_same_moments(net, optimizer, fresh, other)

    run_ranks(2, run)
