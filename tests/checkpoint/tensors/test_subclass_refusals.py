"""Tensor subclasses that cannot be saved or loaded: refused by name, before anything changes."""

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
from dtckpt.checkpoint.dcp.checked_stager import CheckedStager
from dtckpt.checkpoint.tensors.new_subclasses import new_subclass
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Replicate
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks
from .subclass_stand_ins import (
    SHAPE,
    Float8,
    Holder,
    LowBit,
    Made,
    Mxfp8,
    Odd,
    State4bit,
    State8bit,
    of,
    same,
    saved,
)

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


def test_all_ranks_refuse_to_stage_what_one_of_them_has() -> None:
    def body(rank: int, group: Any) -> str:
        stager = CheckedStager(BlockingAsyncStager(), group, no_dist=False)
        state = {"w": of(State8bit, 1) if rank else torch.ones(2), "x": torch.ones(2)}
        try:
            stager.stage(state)
        except Unsavable as error:
            return str(error)
        return ""

    told = run_ranks(2, body)
    assert all("failed on rank 1" in told[rank] and "'w'" in told[rank] for rank in range(2))


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
