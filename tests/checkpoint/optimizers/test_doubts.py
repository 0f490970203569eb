"""Where names of parameters could mean several, state goes to the right one or to none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import run_ranks
from .test_names import (
    Stage,
    Tied,
    assert_same_moments,
    grouped,
    moments,
    saved,
    trained,
    twins,
    weights,
)

rate = torch.optim.lr_scheduler


class Holder:
    """An object that is no module and has one."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the module."""
        return {"w": self.net.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it."""
        self.net.load_state_dict(state_dict["w"])


def refused(state: dict[str, Any], store: MemoryStore, match: str, **options: Any) -> None:
    """No optimizer of the state gets anything."""
    with pytest.raises(LayoutMismatch, match=match):
        dcp.load(state, store, **options)
    optimizers = [v for v in state.values() if isinstance(v, torch.optim.Optimizer)]
    assert optimizers
    assert not any(optimizer.state for optimizer in optimizers)


def test_names_come_from_objects_that_are_not_selected() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"net": Holder(net), "opt": optimizer})
    for select in ("opt", "opt/state", ["opt/*"]):
        fresh = twins(1)
        other = torch.optim.Adam(reversed(weights(fresh)))
        start = weights(fresh)[0].detach().clone()
        report = dcp.load({"net": Holder(fresh), "opt": other}, store, select=select)
        assert report.by_position == ()
        assert_same_moments(net, optimizer, fresh, other)
        assert torch.equal(weights(fresh)[0], start)


def test_a_checkpoint_that_goes_by_names_is_not_loaded_by_position() -> None:
    net = twins()
    for given in (net.parameters(), net.named_parameters()):
        optimizer = torch.optim.Adam(given)
        trained(net, optimizer)
        store = saved({"net": net, "opt": optimizer})
        for strict in (True, False):
            other = torch.optim.Adam(twins(1).parameters())
            message = r"opt: nothing tells the names of its parameters.*net/0\.weight.*Have the mod"
            refused({"opt": other}, store, message, select="opt", strict=strict)


class Two(nn.Module):
    """Parameters that would have one name without what wrappers add."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4, bias=False)
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize("beside", ["module", "state dict", "given names"])
def test_parts_called_module_are_told_apart_though_one_is_frozen(beside: str) -> None:
    def state(net: Two, *, inner: bool) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        named = dict(net.named_parameters())
        chosen = [(n, p) for n, p in named.items() if n.startswith("module") == inner]
        given = beside == "given names"
        optimizer = torch.optim.Adam(chosen if given else [p for _, p in chosen])
        part = net if beside == "module" else net.state_dict()
        if given:  # copies, whose memory tells nothing
            part = {name: value.clone() for name, value in net.state_dict().items()}
        return {"net": part, "opt": optimizer}, optimizer

    for inner in (False, True):
        net = Two()
        first, optimizer = state(net, inner=inner)
        trained(net, optimizer)
        store = saved(first)
        refused(state(Two(), inner=not inner)[0], store, "Missing in the checkpoint: opt/state")
        fresh = Two()
        again, other = state(fresh, inner=inner)
        assert dcp.load(again, store).by_position == ()
        assert_same_moments(net, optimizer, fresh, other)


def test_a_path_at_the_root_is_no_name_in_a_module() -> None:
    def state(trunk: nn.Module, head: nn.Module, part: nn.Module) -> dict[str, Any]:
        return {
            **trunk.state_dict(),
            "head": head.state_dict(),
            "opt": torch.optim.Adam(part.parameters()),
        }

    trunk, head = twins(), twins(1)
    first = state(trunk, head, trunk)
    trained(trunk, first["opt"])
    store = saved(first)
    trunk, head = twins(2), twins(3)
    refused(state(trunk, head, head), store, "Missing in the checkpoint: opt/state/head/0.weight")
    again = state(trunk, head, trunk)
    assert dcp.load(again, store).by_position == ()
    assert moments(again["opt"], weights(trunk)[0]) == moments(
        first["opt"], first["opt"].param_groups[0]["params"][0]
    )


def test_state_of_what_was_renamed_goes_with_it_alone() -> None:
    nets = {"gen": twins(), "disc": twins(1)}
    optimizer = torch.optim.Adam(nets["gen"].parameters())
    trained(nets["gen"], optimizer)
    store = saved({**nets, "opt": optimizer})
    swap = {"gen": "disc", "disc": "gen"}
    now = {"gen": twins(2), "disc": twins(3)}
    wrong = torch.optim.Adam(now["gen"].parameters())
    refused({**now, "opt": wrong}, store, "Missing in .*: opt/state/gen/0.weight", rename=swap)
    other = torch.optim.Adam(now["disc"].parameters())
    dcp.load({**now, "opt": other}, store, rename=swap)
    assert_same_moments(nets["gen"], optimizer, now["disc"], other)


def test_layers_that_were_pruned() -> None:
    net = twins(layers=4)
    weights(net)[2].requires_grad_(False)
    optimizer = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    trained(net, optimizer)
    store = saved({"net": net, "opt": optimizer})
    fresh = twins(1, layers=3)

    def rename(name: str) -> str:  # layer 0 has gone
        for number in (2, 1, 0):
            name = name.replace(f"net/{number}.", f"net/{number + 1}.")
        return name

    # Layer 1 was layer 2, which was frozen: the state under its present name is that of layer 0.
    other = torch.optim.Adam([weights(fresh)[1], weights(fresh)[2]])
    part: dict[str, Any] = {"net": fresh, "opt": other}
    refused(part, store, r"Missing in .*\(opt/state/net/1\.weight in the state", rename=rename)
    report = dcp.load(part, store, rename=rename, strict=False)
    assert weights(fresh)[1] not in other.state
    assert report.missing == ("opt/state/net/2.weight",)
    assert moments(other, weights(fresh)[2]) == moments(optimizer, weights(net)[3])


def test_numbered_checkpoints_that_repeat_names_go_by_position() -> None:
    def make(seed: int, *, named: bool) -> tuple[dict[str, nn.Sequential], torch.optim.Optimizer]:
        nets = {"gen": twins(seed, 3), "disc": twins(seed + 1)}
        groups: list[Any] = [
            {"params": list(net.named_parameters() if named else net.parameters())}
            for net in nets.values()
        ]
        return nets, torch.optim.Adam(groups)

    nets, optimizer = make(0, named=True)
    for net in nets.values():
        trained(net, optimizer)
    store = saved({**nets, "opt": optimizer.state_dict()})
    for named in (False, True):
        fresh, other = make(5, named=named)
        report = dcp.load({**fresh, "opt": other}, store)
        assert report.by_position == tuple(f"opt/state/#{n}" for n in range(5))
        for name, net in nets.items():
            assert_same_moments(net, optimizer, fresh[name], other)
    fresh = twins(7, 3)
    turned = torch.optim.Adam(
        [{"params": list(reversed(weights(fresh)))}, {"params": weights(twins(8))}]
    )
    message = r"opt/state/#0: .*saved as parameter 0 '0\.weight'.* '2\.weight'"
    refused({"gen": fresh, "opt": turned}, store, message, select=["gen", "opt"])


def test_an_average_that_was_the_model_itself_at_the_save() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"model": net, "ema": net, "opt": optimizer})
    fresh, average = twins(1), twins(2)
    other = torch.optim.Adam(reversed(weights(fresh)))
    assert dcp.load({"model": fresh, "ema": average, "opt": other}, store).by_position == ()
    assert_same_moments(net, optimizer, fresh, other)
    again = torch.optim.Adam(reversed(weights(fresh)))
    dcp.load({"model": fresh, "opt": again}, store, select=["model", "opt"])
    assert_same_moments(net, optimizer, fresh, again)


@pytest.mark.parametrize("order", ["eho", "heo"])
def test_what_was_tied_is_found_by_each_of_its_names(order: str) -> None:
    net = Tied(order)
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"model": net, "opt": optimizer})

    def run(rank: int, group: Any) -> None:
        fresh = nn.Module()
        for name in (("embed", "other"), ("head",))[rank]:
            fresh.add_module(name, nn.Linear(4, 4, bias=False))
        other = torch.optim.Adam(fresh.parameters())
        state = {"model": fresh, "opt": other}
        assert dcp.load(state, store, process_group=group).by_position == ()
        for name in ("embed", "head", "other"):
            if hasattr(fresh, name):
                old, new = getattr(net, name).weight, getattr(fresh, name).weight
                assert moments(other, new) == moments(optimizer, old)

    run_ranks(2, run)


class Decay:
    """A factor with parameters, which a scheduler saves."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, epoch: int) -> float:
        return self.base**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "SequentialLR": lambda o: rate.SequentialLR(
        o, [rate.ConstantLR(o), rate.CosineAnnealingLR(o, 7)], [5]
    ),
    "ChainedScheduler": lambda o: rate.ChainedScheduler(
        [rate.LambdaLR(o, [Decay(0.9), Decay(0.8)])]
    ),
    "LambdaLR": lambda o: rate.LambdaLR(o, [Decay(0.9), Decay(0.8)]),
    "CyclicLR": lambda o: rate.CyclicLR(o, 0.1, 1.0, base_momentum=cast(float, [0.5, 0.6])),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_what_schedulers_keep_for_groups_that_moved_is_found_everywhere(kind: str) -> None:
    def make(order: list[int], rates: list[float]) -> Any:
        net = twins()
        groups = [
            {"params": [weights(net)[n]], "lr": lr} for n, lr in zip(order, rates, strict=True)
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return {"net": net, "opt": optimizer, "rate": SCHEDULERS[kind](optimizer)}

    rates = [0.1, 0.2] if kind == "SequentialLR" else [0.1, 0.1]
    store = saved(make([0, 1], rates))
    moved = make([1, 0], rates)
    with pytest.raises(LayoutMismatch, match=r"rate: the scheduler was saved with"):
        dcp.load(moved, store)
    dcp.load(moved, store, select=["net", "opt"])
    dcp.load(make([0, 1], rates), store)


def of_rank(rank: int, order: list[int], layers: int = 2) -> dict[str, Any]:
    """Layers of its own with a group for each, and a scheduler that it keeps for itself."""
    net = Stage(range(10 * rank, 10 * rank + layers), 0)
    params = list(net.parameters())
    groups: list[Any] = [{"params": [params[n]], "lr": 0.1 * (1 + n)} for n in order]
    optimizer = torch.optim.Adam(groups)
    scheduler = rate.StepLR(optimizer, 1)
    return {"model": net, "opt": optimizer, "rate": dcp.PerRank(scheduler)}


def test_schedulers_of_ranks_beside_groups_that_were_brought_together() -> None:
    store = MemoryStore()

    def run(rank: int, group: Any) -> None:
        order = ([0, 1], [1, 0], [1])[rank]
        layers = 2
        state = of_rank(rank, order, layers)
        kept = state["rate"].value.state_dict()
        dcp.save(state, store, process_group=group)
        fresh = of_rank(rank, order, layers)
        for number, param_group in enumerate(fresh["opt"].param_groups):
            param_group["lr"] = 7.0 + number
        dcp.load(fresh, store, process_group=group)
        assert fresh["rate"].value.state_dict() == kept
        moved = of_rank(rank, order[::-1], layers)
        with pytest.raises(LayoutMismatch, match=r"rate/@.: the scheduler was saved with rates"):
            dcp.load(moved, store, process_group=group)

    run_ranks(3, run)


class Custom(torch.optim.Optimizer):
    """An optimizer whose state nobody knows."""

    def __init__(self, params: Any, *, beside: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.beside = beside

    def step(self, closure: Any = None) -> Any:
        """Make the state."""
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param] = {"mine": torch.ones_like(param)}
            if self.beside:
                self.state[param]["history"] = torch.zeros(17)


def test_all_state_is_compared_where_the_position_counts() -> None:
    def params(*sizes: tuple[int, ...]) -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(size)) for size in sizes]

    for make in (Custom, torch.optim.Adafactor, torch.optim.Rprop):
        before = params((3,), (5,))
        optimizer = make(before)
        for param in before:
            param.grad = torch.ones_like(param)
        optimizer.step()
        store = saved({"opt": optimizer})
        refused({"opt": make(params((5,), (3,)))}, store, r"opt/state/#0/\w+: .*saved as .*\[3\]")
        dcp.load({"opt": make(params((3,), (5,)))}, store)
    optimizer = Custom(params((3,), (5,)), beside=True)
    optimizer.step()
    store = saved({"opt": optimizer})
    other = Custom(params((3,), (5,)))
    dcp.load({"opt": other}, store)
    assert all(state["history"].shape == (17,) for state in other.state.values())


def test_a_parameter_with_a_name_does_not_take_the_state_of_one_without() -> None:
    net = twins()
    loose = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.Adam([weights(net)[0], loose])
    loose.grad = torch.ones_like(loose)
    trained(net, optimizer)
    store = saved({"net": net, "opt": optimizer})
    fresh = twins(1)
    other = torch.optim.Adam(fresh.parameters())
    refused({"net": fresh, "opt": other}, store, "Missing in .*: opt/state/net/1.weight")


def test_flat_state_of_all_parameters_goes_by_their_order() -> None:
    net = twins(layers=3)
    optimizer = torch.optim.LBFGS(net.parameters())

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = net(torch.ones(2, 4)).square().sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    step(net, optimizer)
    store = saved({"net": net, "opt": optimizer})
    orders = ([2, 1, 0], [0, 2, 1], [0, 1], [1, 0, 2])
    for strict in (True, False):
        for order in orders:
            fresh = twins(1, layers=3)
            other = torch.optim.LBFGS([weights(fresh)[n] for n in order])
            refused({"net": fresh, "opt": other}, store, "opt: .*order", strict=strict)
    fresh = twins(1, layers=3)
    other = torch.optim.LBFGS(fresh.parameters())
    dcp.load({"net": fresh, "opt": other}, store)
    step(net, optimizer)
    step(fresh, other)
    assert torch.equal(weights(fresh)[0], weights(net)[0])


def test_settings_that_were_not_saved_stay_in_each_part_of_a_split_group() -> None:
    net = twins()
    optimizer = grouped(net, [(0.1, [0, 1])])
    store = saved({"net": net, "opt": optimizer})
    fresh = twins(1)
    other = grouped(fresh, [(8.0, [0]), (9.0, [1])])
    other.param_groups[1]["mine"] = 3
    dcp.load({"net": fresh, "opt": other}, store)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]
    assert [group.get("mine") for group in other.param_groups] == [None, 3]


def test_a_state_dict_of_numbers_is_not_filled_from_names() -> None:
    net = twins(layers=3)
    for make in (torch.optim.SGD, torch.optim.Adam):
        optimizer = make([{"params": [w], "lr": 0.1 + n} for n, w in enumerate(weights(net))])
        trained(net, optimizer)
        store = saved({"net": net, "opt": optimizer})
        fresh = twins(1, layers=3)
        other = make([{"params": [w]} for w in reversed(weights(fresh))], lr=0.5)
        state = other.state_dict()
        for strict in (True, False):
            with pytest.raises(LayoutMismatch, match=r"opt: .*give the optimizer itself"):
                dcp.load({"net": fresh, "opt": state}, store, strict=strict)
        assert state["param_groups"][0]["params"] == [0]
        numbered = saved({"opt": optimizer.state_dict()})
        dcp.load({"opt": state}, numbered, strict=False)
        assert state["param_groups"][0]["lr"] == 0.1


def test_parts_of_an_optimizer_that_were_moved_apart_are_refused() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    tree = {"net": net, "opt": optimizer}
    store = saved(tree)
    fresh = twins(1)
    other = torch.optim.Adam(fresh.parameters())
    trained(fresh, other)
    before = moments(other, weights(fresh)[0])

    def apart(name: str) -> str:
        return name.replace("mine/state", "opt/state").replace(
            "mine/param_groups/", "opt/param_groups/"
        )

    state = {"net": fresh, "mine": other}
    with pytest.raises(
        LayoutMismatch, match="rename= and select= can move and take an optimizer as"
    ):
        dcp.load(state, store, rename=apart, strict=False)
    assert moments(other, weights(fresh)[0]) == before


def test_state_of_any_shape_goes_by_names() -> None:
    net = twins()
    optimizer = Custom(net.named_parameters(), beside=True)
    for param in net.parameters():
        optimizer.state[param] = {"history": torch.zeros(17)}
    store = saved({"opt": optimizer})
    fresh = twins(1)
    other = Custom(reversed(list(fresh.named_parameters())))
    dcp.load({"opt": other}, store)
    assert other.state[weights(fresh)[0]]["history"].shape == (17,)


def test_state_dicts_of_numbers_whose_names_differ_are_refused() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.named_parameters())
    trained(net, optimizer)
    store = saved({"opt": optimizer.state_dict()})
    other = torch.optim.Adam(reversed(list(twins(1).named_parameters())))
    with pytest.raises(LayoutMismatch, match=r"parameter 0 was saved as '0\.weight', but is '1\."):
        dcp.load({"opt": other.state_dict()}, store, strict=False)
    dcp.load(
        {"opt": torch.optim.Adam(twins(1).named_parameters()).state_dict()}, store, strict=False
    )


@pytest.mark.parametrize("own", ["scheduler", "both"])
def test_a_scheduler_of_each_rank_beside_groups_that_all_have(own: str) -> None:
    store = MemoryStore()
    start = twins()

    def make() -> tuple[dict[str, Any], Any]:
        optimizer = grouped(start, [(0.1, [0]), (0.2, [1])])
        scheduler = rate.ReduceLROnPlateau(optimizer, min_lr=[0.01, 0.02])
        if own == "both":
            return {"own": dcp.PerRank({"net": start, "opt": optimizer, "s": scheduler})}, scheduler
        return {"net": start, "opt": optimizer, "s": dcp.PerRank(scheduler)}, scheduler

    state, scheduler = make()
    scheduler.step(1.0)
    dcp.save(state, store)
    fresh, loaded = make()
    dcp.load(fresh, store)
    assert loaded.state_dict() == scheduler.state_dict()


def test_names_that_were_given_do_not_count_where_they_are_renamed() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.named_parameters())
    trained(net, optimizer)
    store = saved({"opt": optimizer})
    fresh = twins(1)
    other = torch.optim.Adam(fresh.named_parameters())

    def turned(name: str) -> str:
        swap = {"net/0.weight": "net/1.weight", "net/1.weight": "net/0.weight"}
        return swap.get(name, name)

    dcp.load({"net": fresh, "opt": other}, store, select="opt", rename=turned)
    for number in (0, 1):
        expected = moments(optimizer, weights(net)[1 - number])
        assert moments(other, weights(fresh)[number]) == expected


def test_a_new_name_that_was_not_saved_says_nothing_of_the_old_one() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.parameters())
    trained(net, optimizer)
    store = saved({"net": net, "opt": optimizer})
    fresh = twins(1)
    part = {"net": fresh, "opt": torch.optim.Adam(fresh.parameters())}
    refused(
        part, store, "Missing in the checkpoint: opt/state/", rename={"net": "gone"}, select="opt"
    )


def test_names_within_modules_fit_paths_at_the_root_no_better_than_others() -> None:
    net = twins()
    optimizer = torch.optim.Adam(net.named_parameters())
    trained(net, optimizer)
    store = saved({"net": net, "opt": optimizer.state_dict()})
    trunk, fresh = twins(1), twins(2)
    other = torch.optim.Adam([*trunk.parameters(), *fresh.parameters()])
    state = {**trunk.state_dict(), "net": fresh, "opt": other}
    refused(state, store, "more than one parameter may be this one", strict=False)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.module."])
def test_wrappers_around_a_part_called_module_are_not_guessed(wrapper: str) -> None:
    def adam(names: list[str], within: str = "") -> torch.optim.Adam:
        params = [(within + name, nn.Parameter(torch.zeros(2))) for name in names]
        optimizer = torch.optim.Adam(params)
        for number, (_, param) in enumerate(params, 1):
            param.grad = torch.full_like(param, number)
        optimizer.step()
        return optimizer

    def averages(optimizer: torch.optim.Adam) -> list[float]:
        params = optimizer.param_groups[0]["params"]
        return [float(optimizer.state[param]["exp_avg"][0]) for param in params]

    alike = ["a", "module.a"]
    for before, after in (("", wrapper), (wrapper, "")):
        optimizer, other = adam(alike, before), adam(alike[::-1], after)
        kept = averages(other)
        with pytest.raises(LayoutMismatch, match="parameter 0 of opt may be any of"):
            dcp.load({"opt": other}, saved({"opt": optimizer}), strict=False)
        assert averages(other) == kept
        dcp.load({"opt": adam(alike[::-1], before)}, saved({"opt": optimizer}))
        other = adam(["b", "a"], after)
        dcp.load({"opt": other}, saved({"opt": adam(["a", "b"], before)}))
        assert averages(other) == pytest.approx([0.2, 0.1])
