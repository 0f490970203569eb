"""Tensor subclasses that are made of others: saved as these, and made again of these."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import dcp
from dtckpt.dtensor import Mesh
from dtckpt.errors import CheckpointError, LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ...ranks import run_ranks
from .subclass_stand_ins import (
    SHAPE,
    Float8,
    Holder,
    LowBit,
    Made,
    Odd,
    Scaled,
    State4bit,
    State8bit,
    StateFp8,
    of,
    same,
    saved,
)

KINDS: list[Any] = [State8bit, State4bit, StateFp8]


@pytest.mark.parametrize("kind", [*KINDS, Float8])
def test_a_subclass_is_saved_as_what_it_consists_of_and_filled_in_place(kind: Any) -> None:
    want, into = of(kind, 1), of(kind, 2)
    store = saved({"a": {"w": want}, "list": [of(kind, 3), 5]})
    inner = {key: getattr(into, key) for key in into.__tensor_flatten__()[0]}
    state: dict[str, Any] = {"a": {"w": into}, "list": [of(kind, 2), 0]}
    ckpt.load(state, store)
    assert state["a"]["w"] is into
    assert all(getattr(into, key) is tensor for key, tensor in inner.items())
    assert same(into, want)
    assert same(state["list"][0], of(kind, 3))
    assert state["list"][1] == 5


def test_subclasses_of_subclasses() -> None:
    def make(seed: int) -> Any:
        return Scaled({"codes": of(State8bit, seed), "factor": torch.tensor(seed)}, [], SHAPE)

    store, into = saved({"w": make(3)}), make(4)
    assert {*ckpt.open(store)} == {"w/codes/codes", "w/codes/scale", "w/codes/qmap", "w/factor"}
    ckpt.load({"w": into}, store)
    assert same(into, make(3))
    holder = Holder(None)
    ckpt.load({"h": holder}, saved({"h": Holder(make(5))}))
    assert same(holder.value, make(5))


def test_a_context_of_other_objects_may_be_pickled() -> None:
    def make(thing: Any) -> Any:
        return Odd({"codes": torch.ones(2)}, [thing], (2,))

    store, into = saved({"w": make(1j), "x": make(slice(2))}, allow_pickle=True), make(slice(2))
    into.codes.zero_()
    ckpt.load({"w": make(1j), "x": into}, store, allow_pickle=True)
    assert into.codes.sum() == 2
    with pytest.raises(LayoutMismatch, match=r"x: the .*Odd has the context"):
        ckpt.load({"w": make(1j), "x": make(slice(3))}, store, allow_pickle=True)
    with pytest.raises(Unsavable, match=r"Odd.*tells of something that a checkpoint does not hold"):
        saved({"x": make(lambda: 1)}, allow_pickle=True)
    store = saved({"h": Holder(make(slice(2)))}, allow_pickle=True)
    with pytest.raises(CheckpointError, match="pass allow_pickle=True"):
        ckpt.load({"h": Holder(None)}, store)
    holder = Holder(None)
    ckpt.load({"h": holder}, store, allow_pickle=True)
    assert holder.value.thing == slice(2)


def test_readers_without_the_class_have_the_inner_tensors_by_name() -> None:
    want = of(State8bit, 1)
    found = ckpt.open(saved({"w": want, "x": 1}))
    assert list(found) == ["w/codes", "w/scale", "w/qmap"]
    assert torch.equal(found["w/codes"][...], want.codes)
    assert found.manifest.version == 3
    assert found.state_dict()["w"].keys() == {"codes", "scale", "qmap"}
    into = {"w": {key: torch.zeros_like(getattr(want, key)) for key in State8bit.names}, "x": 0}
    with pytest.raises(LayoutMismatch, match="w: a dict is wanted, but subclass was saved"):
        ckpt.load(into, saved({"w": want, "x": 1}))


@pytest.mark.parametrize(
    "save", ["save", "async", "spread", "checked", "manager", "dcp", "dcp async"]
)
def test_every_form_of_save_writes_the_inner_tensors(save: str, tmp_path: Path) -> None:
    net, optimizer, train = training(State8bit)
    train(2)
    state = {"m": net, "o": optimizer, "w": of(State8bit, 1)}
    place = str(tmp_path / "c")
    if save == "save":
        ckpt.save(state, place)
    elif save == "manager":
        with ckpt.CheckpointManager(place) as manager:
            manager.save(1, state)
        place = f"{place}/step-1"
    elif save == "dcp":
        dcp.save(state, checkpoint_id=place)
    elif save == "dcp async":
        dcp.async_save(state, checkpoint_id=place).result()  # pyright: ignore
    else:
        spread: Any = {"async": False, "spread": True, "checked": "checked"}[save]
        handle = ckpt.async_save(state, place, spread=spread)
        before = {key: value["momentum_buffer"].clone() for key, value in optimizer.state.items()}
        train(2)  # what has been staged is of before
        handle.result()
        optimizer.state.update({k: {"momentum_buffer": v, "step": 0} for k, v in before.items()})
    got = ckpt.open(place)
    for name, param in net.named_parameters():
        momentum = optimizer.state[param]["momentum_buffer"]
        for key in State8bit.names if isinstance(momentum, Made) else ():
            stored = got[f"o/state/m/{name}/momentum_buffer/{key}"][...]
            assert torch.equal(stored, getattr(momentum, key)), (name, key)
    assert ckpt.verify(place).problems == ()


def training(kind: Any) -> tuple[nn.Module, LowBit, Callable[[int], list[float]]]:
    """A model, its optimizer, and what trains it for some steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32, bias=False), nn.Linear(32, 3))
    optimizer = LowBit(net.parameters(), kind)

    def train(steps: int) -> list[float]:
        losses: list[float] = []
        for number in range(steps):
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = net(torch.randn(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return net, optimizer, train


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_goes_on_bit_for_bit(kind: Any, steps: int) -> None:
    net, optimizer, train = training(kind)
    train(3)
    store = saved({"m": net, "o": optimizer})
    want = train(3)
    other, its, go_on = training(kind)
    go_on(steps)
    ckpt.load({"m": other, "o": its}, store)
    assert go_on(3) == want
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert same(optimizer.state[mine]["momentum_buffer"], its.state[theirs]["momentum_buffer"])


def test_state_of_another_class_takes_the_saved_form() -> None:
    net, optimizer, train = training(State8bit)
    train(1)
    store = saved({"m": net, "o": optimizer})
    other, its, go_on = training(StateFp8)
    go_on(1)
    ckpt.load({"m": other, "o": its}, store)
    assert type(its.state[next(other.parameters())]["momentum_buffer"]) is State8bit
    plain, of_plain, go_on = training(State8bit)
    of_plain.fewest = 1 << 30
    go_on(1)
    store = saved({"m": plain, "o": of_plain})
    ckpt.load({"m": net, "o": optimizer}, store)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert same(
            optimizer.state[mine]["momentum_buffer"], of_plain.state[theirs]["momentum_buffer"]
        )


@pytest.mark.parametrize("held", [None, State8bit, State4bit, torch.zeros])
def test_objects_are_given_what_was_saved(held: Any) -> None:
    store = saved({"h": Holder(of(State8bit, 1))})
    value = held and (held(3) if held is torch.zeros else of(held, 2))
    holder = Holder(value)
    ckpt.load({"h": holder}, store)
    assert same(holder.value, of(State8bit, 1))
    assert (holder.value is value) == (held is State8bit)


def test_values_of_ranks_and_of_coordinates() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        ckpt.save({"w": ckpt.PerRank(of(State8bit, rank))}, store, process_group=group)

    def load(rank: int, group: Any) -> None:
        state = {"w": ckpt.PerRank(of(State8bit, 9))}
        ckpt.load(state, store, process_group=group)
        assert same(state["w"].value, of(State8bit, rank))

    run_ranks(2, save)
    assert "w/@1/codes" in ckpt.open(store)
    run_ranks(2, load)
    for value in (of(State8bit, 1), Holder(of(State8bit, 1))):
        store = saved({"w": ckpt.PerCoordinate(value, axes=())})
        into: Any = of(State8bit, 2) if isinstance(value, Made) else Holder(None)
        state = {"w": ckpt.PerCoordinate(into, axes=())}
        ckpt.load(state, store)
        assert same(getattr(into, "value", into), of(State8bit, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, State8bit.__module__)
        with pytest.raises(LayoutMismatch, match="State8bit', which is not imported here"):
            ckpt.load({"w": ckpt.PerCoordinate(Holder(None), axes=())}, store)


def test_a_module_with_such_parameters() -> None:
    def make(seed: int) -> nn.Linear:
        net = nn.Linear(32, 8)
        net.weight = nn.Parameter(of(State8bit, seed), requires_grad=False)
        return net

    net = make(1)
    store, other = saved({"m": net}), make(2)
    assert "m/weight/codes" in ckpt.open(store)
    ckpt.load({"m": other}, store)
    assert same(other.weight, of(State8bit, 1))
    assert torch.equal(other.bias, net.bias)


def test_names_that_wrappers_add_are_left_out() -> None:
    into = {"m": {"0.weight": of(State8bit, 2), "0.bias": torch.zeros(1)}}
    wrapped = {"_orig_mod.0.weight": of(State8bit, 1), "_orig_mod.0.bias": torch.ones(1)}
    ckpt.load(into, saved({"m": wrapped}))
    assert same(into["m"]["0.weight"], of(State8bit, 1))
    assert into["m"]["0.bias"].item() == 1


def test_what_is_renamed_as_a_whole_is_still_of_its_class(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        return Scaled({"codes": of(State8bit, seed), "factor": torch.tensor(seed)}, [], SHAPE)

    state = {"a": {"w": of(State8bit, 1), "n": make(2)}, "x": torch.ones(1)}
    ckpt.save(state, tmp_path / "c")
    rename = {"a/w/{rest*}": "b/v/{rest*}", "a/n/{rest*}": "n/{rest*}"}
    ckpt.edit(tmp_path / "c", rename=rename)
    into: dict[str, Any] = {"b": {"v": of(State8bit, 3)}, "n": make(3), "x": torch.zeros(1)}
    ckpt.load(into, tmp_path / "c")
    assert same(into["b"]["v"], of(State8bit, 1))
    assert same(into["n"], make(2))
    ckpt.edit(tmp_path / "c", rename={"b/v/codes": "b/v/bytes"})
    with pytest.raises(LayoutMismatch, match="State8bit is wanted, a dict was saved"):
        ckpt.load({"b": {"v": of(State8bit, 3)}}, tmp_path / "c", select=["b"])
    named = {"v": of(State8bit, 3)}
    ckpt.load(named, saved({"w": of(State8bit, 1)}), rename={"v": "w"})
    assert same(named["v"], of(State8bit, 1))


def test_a_comparison_tells_of_other_contexts() -> None:
    first, unlike = of(State8bit, 1), of(State8bit, 1)
    unlike.signed = False
    one, other = saved({"a": {"w": first}}), saved({"a": {"w": unlike}})
    assert list(ckpt.compare(one, other).values) == ["a/w"]
    assert ckpt.compare(one, other, "a/w/codes").values.keys() == {"a/w"}
    assert not ckpt.compare(one, one).values
    assert not ckpt.compare(one, saved({"a": {"w": {"codes": first.codes}}})).values


def test_rewritten_checkpoints_keep_the_class(tmp_path: Path) -> None:
    want = of(State8bit, 1)
    ckpt.save({"w": want, "x": torch.ones(4)}, tmp_path / "a")
    ckpt.reshard(
        tmp_path / "a", tmp_path / "b", Mesh.parse("a=2"), ckpt.parse_rules("w/codes=S(0)")
    )
    ckpt.copy(tmp_path / "b", tmp_path / "c")
    into = of(State8bit, 2)
    ckpt.load({"w": into, "x": torch.zeros(4)}, tmp_path / "c")
    assert same(into, want)
    ckpt.export(tmp_path / "a", tmp_path / "s.safetensors")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "s.safetensors")["w.codes"], want.codes)
