"""Tensor subclasses that are made of others: saved as these, and made again of these."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import dcp
from dtckpt.checkpoint.tensors.new_subclasses import new_subclass
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Replicate
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks
from .subclass_stand_ins import (
    Float8,
    LowBit,
    Made,
    Mxfp8,
    Scaled,
    State4bit,
    State8bit,
    StateFp8,
    same,
)

KINDS: list[Any] = [State8bit, State4bit, StateFp8]
SHAPE = (8, 32)


def of(kind: Any, seed: int) -> Any:
    """A tensor of random values."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    if kind is Float8:
        return Float8.of(values)
    made = kind.zeros(SHAPE)
    made.fill(values)
    return made


def saved(state: Any, **options: Any) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    ckpt.save(state, store, **options)
    return store


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


STAGERS: dict[str, dict[str, Any]] = {
    "planner": {"planner": DefaultSavePlanner()},
    "stager": {"async_stager": BlockingAsyncStager()},
    "torch's writer": {},
    "torch's call": {},
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("how", STAGERS)
@pytest.mark.parametrize("is_shard", [False, True])
def test_stagers_of_torch_are_not_given_what_has_no_memory(
    how: str, is_shard: bool, tmp_path: Path
) -> None:
    want: Any = of(State8bit, 1)
    if is_shard:
        mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
        want = DTensor.from_local(want, mesh, [Replicate()], shape=SHAPE)
    mine = torch_async_save if how == "torch's call" else dcp.async_save
    kind = TorchWriter if how == "torch's writer" else dcp.FileSystemWriter
    writer: Any = kind(str(tmp_path / "c"))
    with pytest.raises(Unsavable, match=r"'m/w' is .*State8bit.*stagers copy memory"):
        mine({"m": {"w": want}}, storage_writer=writer, no_dist=True, **STAGERS[how])
    assert not (tmp_path / "c" / "manifest.json").exists()
    net = nn.Linear(1, 1)
    net.weight = nn.Parameter(of(State8bit, 1), requires_grad=False)
    with pytest.raises(Unsavable, match=r"'m.weight' is .*State8bit.*stagers copy memory"):
        mine({"m": net}, storage_writer=writer, no_dist=True, **STAGERS[how])
    plain = {"m": {"w": torch.ones(3), "x": 2}}
    mine(plain, storage_writer=writer, no_dist=True, **STAGERS[how]).result()  # pyright: ignore
    assert ckpt.open(tmp_path / "c")["m/w"][...].sum() == 3


@pytest.mark.filterwarnings("ignore:.*")
def test_a_planner_of_torch_is_refused_such_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"(?s)State8bit.*without a planner"):
        dcp.save(
            {"w": of(State8bit, 1)},
            checkpoint_id=tmp_path / "c",
            planner=DefaultSavePlanner(),
            no_dist=True,
        )
    assert not (tmp_path / "c" / "manifest.json").exists()


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


def test_state_of_a_parameter_of_another_shape_is_refused() -> None:
    def make(rows: int) -> tuple[nn.Module, LowBit]:
        net = nn.Linear(64, rows, bias=False)
        optimizer = LowBit(net.parameters(), State8bit)
        net.weight.grad = torch.ones(rows, 64)
        optimizer.step()
        return net, optimizer

    _, optimizer = make(4)
    net, other = make(8)
    before = other.state[next(net.parameters())]["momentum_buffer"].clone()
    store = saved({"o": optimizer})
    match = r"o/state/#0/momentum_buffer: saved as \[4, 64\].*\[8, 64\]"
    with pytest.raises(LayoutMismatch, match=match):
        ckpt.load({"o": other}, store)
    assert same(other.state[next(net.parameters())]["momentum_buffer"], before)
    again = make(4)[1]
    ckpt.load({"o": again}, store)
    (one,), (two,) = again.state.values(), optimizer.state.values()
    assert same(one["momentum_buffer"], two["momentum_buffer"])


class Holder:
    """An object with a tensor, or none yet."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "list": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["list"] is not None
        self.value = state["value"]


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


def test_ranks_compare_inner_tensors_and_context() -> None:
    def save(make: Callable[[int], Any]) -> Any:
        store = MemoryStore()

        def body(rank: int, group: Any) -> None:
            ckpt.save({"w": make(rank)}, store, process_group=group)

        run_ranks(2, body)
        return store

    assert "w/codes" in ckpt.open(save(lambda _: of(State8bit, 1)))
    with pytest.raises(RanksFailed, match="w/codes' has different values"):
        save(lambda rank: of(State8bit, rank))

    def unlike(rank: int) -> Any:
        made = of(State8bit, 1)
        made.signed = rank == 1
        return made

    with pytest.raises(RanksFailed, match=r"State8bit float32\[8, 32\] with .*\[False.*\[True"):
        save(unlike)


def test_what_differs_is_named_before_anything_changes() -> None:
    want = of(State8bit, 1)
    store = saved({"w": want, "x": torch.ones(2)})

    def refused(into: Any, match: str, **options: Any) -> None:
        beside = torch.zeros(2)
        before = [t.clone() for t in inner(into)]
        with pytest.raises(CheckpointError, match=match):
            ckpt.load({"w": into, "x": beside}, store, **options)
        assert beside.tolist() == [0, 0]
        assert all(map(torch.equal, inner(into), before))

    def inner(value: Any) -> list[torch.Tensor]:
        if not isinstance(value, Made):
            return []
        return [getattr(value, key).view(torch.uint8) for key in value.__tensor_flatten__()[0]]

    refused(of(State4bit, 2), r"w: a .*State4bit is wanted, a .*State8bit was saved")
    refused(Mxfp8(1), r"w: a .*Mxfp8 is wanted, a .*State8bit was saved|cannot be loaded")
    refused(torch.zeros(SHAPE), r"w: a tensor is wanted, a .*State8bit was saved")
    unlike = of(State8bit, 2)
    unlike.signed = False
    refused(unlike, r"has the context \{'list': \[False.* here, and had \{'list': \[True")
    refused(State8bit.zeros((8, 64)), r"has the shape \[8, 64\] here, and had \[8, 32\]")
    wider = of(State8bit, 2)
    wider.scale = wider.scale.double()
    refused(wider, "scale of it was saved as float32, and is torch.float64", dtype_policy="widen")
    cached = of(State8bit, 2)
    cached.computed = torch.zeros(3)
    refused(cached, "has computed beside the tensors that it consists of")
    refused(of(State8bit, 2), "only a part of it is selected", select=["w/codes", "x"])
    plain = saved({"w": torch.zeros(SHAPE)})
    with pytest.raises(LayoutMismatch, match=r"w: a .*State8bit is wanted, a tensor was saved"):
        ckpt.load({"w": want}, plain)
    ckpt.load({"w": of(State8bit, 2), "x": torch.zeros(2)}, store, select=["x"])


def test_names_of_inner_tensors_are_compared() -> None:
    values = torch.randn(4, 4)
    store = saved({"w": Float8.of(values, transposed=True)})
    assert "w/_transpose" in ckpt.open(store)
    with pytest.raises(LayoutMismatch, match="consists of _data, _scale_inv here, and of _data"):
        ckpt.load({"w": Float8.of(values)}, store)
    into = Float8.of(torch.zeros(4, 4), transposed=True)
    ckpt.load({"w": into}, store)
    assert same(into, Float8.of(values, transposed=True))


def nested(layout: Any) -> Any:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)


class Odd(Made):
    """A subclass whose context may be more than plain values."""

    names = ("codes",)
    facts = ("thing",)

    @staticmethod
    def __new__(cls: Any, *parts: Any) -> Any:
        make: Any = torch.Tensor
        made = make._make_wrapper_subclass(cls, parts[2], dtype=torch.float32)
        made.codes, made.thing = parts[0].get("codes"), parts[1][0]
        return made


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Mxfp8(2), r"Mxfp8.*tells by __tensor_flatten__.*_rowwise_data, _rowwise_scale"),
        (lambda: nested(torch.jagged), r"'w' is a nested tensor.*offsets\(\)"),
        (lambda: nested(torch.strided), r"'w' is a nested tensor.*offsets\(\)"),
        (lambda: Odd({"codes": torch.zeros(2)}, [object()], (2,)), r"Odd.*type builtins.object"),
        (lambda: Odd({"codes": torch.zeros(2)}, [{0.5: 1}], (2,)), r"Odd.*does not hold"),
        (lambda: Odd({"codes": 1.0}, [1], (2,)), r"Odd.*consists of \['codes'\].*not of tensors"),
        (lambda: Odd({}, [1], (2,)), r"Odd.*consists of nothing"),
    ],
    ids=["no flatten", "jagged", "strided", "object", "keys", "no tensor", "nothing"],
)
@pytest.mark.parametrize("save", ["save", "async"])
def test_what_cannot_be_taken_apart_is_refused_by_name(make: Any, match: str, save: str) -> None:
    store = MemoryStore()
    state = {"a": torch.zeros(2), "w": make()}

    def call() -> None:
        if save == "save":
            ckpt.save(state, store)
        else:
            ckpt.async_save(state, store).result()

    with pytest.raises(Unsavable, match=f"(?s){match}"):
        call()
    with pytest.raises(CheckpointError):
        ckpt.open(store)


def test_a_class_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved({"h": Holder(of(State8bit, 1)), "x": torch.ones(1)})
    module = sys.modules[State8bit.__module__]
    beside = torch.zeros(1)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, State8bit.__module__)
        with pytest.raises(LayoutMismatch, match=r"State8bit', which is not imported here.*import"):
            ckpt.load({"h": Holder(None), "x": beside}, store)
        assert State8bit.__module__ not in sys.modules
    with monkeypatch.context() as patch:
        patch.setattr(module, "State8bit", dict)
        with pytest.raises(LayoutMismatch, match="which is no subclass of"):
            ckpt.load({"h": Holder(None), "x": beside}, store)
    with monkeypatch.context() as patch:
        patch.setattr(State8bit, "facts", ("signed",))
        with pytest.raises(LayoutMismatch, match=r"__tensor_unflatten__ does not take what was"):
            ckpt.load({"h": Holder(None), "x": beside}, store)
    assert beside.item() == 0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("not_there:Class", "is not imported here"),
        ("lazy_one:Class", "is not imported here"),
        ("lazy_one:Outer.Class", "is not imported here"),
        ("builtins:dict", "which is no subclass of"),
        ("torch:Tensor", "which is no subclass of"),
        ("nonsense", "is not imported here"),
        ("dtckpt.dtensor.dtensor:DTensor", "DTensor"),
    ],
)
def test_nothing_is_imported_for_the_name_of_a_class(
    text: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imports(name: str) -> Any:
        raise AssertionError(f"{name} would be imported")

    module = ModuleType("lazy_one")
    module.__getattr__ = imports  # pyright: ignore
    module.Outer = type("Outer", (), {})  # pyright: ignore
    monkeypatch.setitem(sys.modules, "lazy_one", module)
    node = ckpt.open(saved({"w": of(State8bit, 1)})).manifest.tree["dict"]["w"]
    node["subclass"]["class"] = text
    with pytest.raises(LayoutMismatch, match=match):
        new_subclass(node, "w", lambda _: torch.zeros(SHAPE), allow_pickle=False)


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


def test_a_module_on_the_meta_device_is_refused() -> None:
    net = nn.Linear(32, 8)
    net.weight = nn.Parameter(of(State8bit, 1), requires_grad=False)
    store = saved({"m": net})
    with torch.device("meta"):
        other = nn.Linear(32, 8)
    tensors = {key: getattr(of(State8bit, 1), key).to("meta") for key in State8bit.names}
    other.weight = nn.Parameter(
        State8bit(tensors, [True, torch.float32], SHAPE), requires_grad=False
    )
    with pytest.raises(LayoutMismatch, match=r"m/weight: a .*State8bit on the meta device"):
        ckpt.load({"m": other}, store)


def test_malformed_nodes_are_corrupt() -> None:
    from dtckpt.checkpoint.state.tree import children

    good = ckpt.open(saved({"w": of(State8bit, 1)})).manifest.tree["dict"]["w"]["subclass"]
    assert len(children({"subclass": good})) == 3
    for change in (
        {"class": 1},
        {"size": [-1, 2]},
        {"size": [True, 2]},
        {"stride": [1]},
        {"dtype": None},
        {"tensors": {}},
        {"tensors": []},
        {"more": 1},
    ):
        with pytest.raises(Corrupt, match="malformed subclass node"):
            children({"subclass": {**good, **change}})
    with pytest.raises(Corrupt):
        children({"subclass": 1})


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
