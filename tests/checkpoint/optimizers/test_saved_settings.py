"""The checkpoint says which settings groups have, and of which form state is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.tensor_lines import tensors_from_json
from dtckpt.checkpoint.loading.report import LoadReport
from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.geometry.mesh import Mesh
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import run_on_mesh
from ..loading.test_object_state import Holder


class Counting(Optimizer):
    """Counts its steps in its groups, and keeps texts, and orders of dims, in its state."""

    def __init__(self, params: Any, lr: Any = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    def step(self, closure: Any = None) -> Any:
        """Count, and fill the state."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["history"] = [torch.tensor(float(group["step"])), "up"]
            for param in group["params"]:
                whole = param.detach() + group["step"]
                self.state[param] = {
                    "turned": whole.t().contiguous().t(),
                    "mode": "warm",
                    "pair": (group["step"], "steps"),
                    "factor": whole.new_ones(3, 5, 4).permute(2, 0, 1),
                }
        return closure


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 3, bias=False)


def _round_trip(saved: Any, fresh: Any, **options: Any) -> tuple[Any, LoadReport]:
    model, other, store = _model(0), _model(1), MemoryStore()
    was, now = saved(model.parameters()), fresh(other.parameters())
    was.step()
    dcp.save({"model": model, "opt": was}, store)
    report = dcp.load({"model": other, "opt": now}, store, **options)
    return now, report


def test_a_fresh_optimizer_gets_what_steps_put_into_its_groups() -> None:
    now, _ = _round_trip(Counting, Counting)
    (group,) = now.param_groups
    assert group["step"] == 1
    assert group["history"] == [torch.tensor(1.0), "up"]


@pytest.mark.parametrize("strict", [True, "state"])
def test_settings_of_a_later_release_stay(strict: Any) -> None:
    def with_later(params: Any) -> Counting:
        return Counting(params, later="yes")

    now, report = _round_trip(Counting, with_later, strict=strict)
    assert now.param_groups[0]["later"] == "yes"
    assert not report.missing


@pytest.mark.parametrize("is_tensor", [True, False])
def test_the_rate_has_the_form_that_was_saved(is_tensor: bool) -> None:
    def of_tensor(params: Any) -> Counting:
        return Counting(params, lr=torch.tensor(0.25))

    def of_float(params: Any) -> Counting:
        return Counting(params, lr=0.25)

    makers = (of_tensor, of_float) if is_tensor else (of_float, of_tensor)
    now, _ = _round_trip(*makers)
    assert isinstance(now.param_groups[0]["lr"], torch.Tensor) is is_tensor
    assert now.param_groups[0]["lr"] == 0.25


def test_texts_in_state_are_as_they_were() -> None:
    """``load_state_dict`` of torch makes the text of a generator of each."""
    now, _ = _round_trip(Counting, Counting)
    (entry,) = now.state.values()
    assert entry["mode"] == "warm"
    assert entry["pair"] == (1, "steps")


def test_an_entry_of_nothing_comes_back() -> None:
    def touched(params: Any) -> Counting:
        made = Counting(params)
        made.step = lambda closure=None: made.state[made.param_groups[0]["params"][0]]
        return made

    now, _ = _round_trip(touched, Counting)
    assert list(now.state.values()) == [{}]


def test_state_has_its_order_in_memory_again() -> None:
    now, _ = _round_trip(Counting, Counting)
    (entry,) = now.state.values()
    assert entry["turned"].stride() == (1, 3)
    assert entry["factor"].stride() == (1, 20, 4)


def test_objects_have_tensors_in_their_order_again() -> None:
    store, loaded = MemoryStore(), Holder(None)
    dcp.save({"o": Holder(torch.arange(6.0).view(2, 3).t())}, store)
    dcp.load({"o": loaded}, store)
    assert loaded.value.stride() == (1, 3)
    assert loaded.value.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize("order", [[0], [1, 1], [0, 2], "up", [0, True], [0, 1, 2]])
def test_an_order_of_other_dims_is_damage(order: Any) -> None:
    told = {"dtype": "F32", "shape": [2, 3], "mesh": 0, "placements": ["R"], "writer": 0}
    meshes = [Mesh((1,), ("rank",))]
    assert tensors_from_json({"w": told | {"order": [1, 0]}}, meshes)["w"].order == (1, 0)
    with pytest.raises((ValueError, TypeError)):
        tensors_from_json({"w": told | {"order": order}}, meshes)


class Otherwise(Optimizer):
    """Keeps state that is not laid out as its parameter, and turned."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        """Fill the state."""
        for param in self.param_groups[0]["params"]:
            rows = distribute_tensor(torch.arange(24.0).view(6, 4), param.device_mesh, [Shard(0)])
            mesh, turned = param.device_mesh, torch.ones(5, 3).t()
            whole = DTensor.from_local(turned, mesh, [Replicate()], shape=(3, 5), stride=(1, 3))
            self.state[param] = {"rows": rows, "whole": whole}
        return closure


def test_state_that_lay_otherwise_lies_so_on_another_mesh() -> None:
    store = MemoryStore()

    def net(mesh: DeviceMesh) -> nn.Module:
        model = nn.Linear(4, 6, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)]))
        return model

    def save(mesh: DeviceMesh) -> None:
        model = net(mesh)
        optimizer = Otherwise(model.parameters())
        optimizer.step()
        dcp.save({"net": model, "opt": optimizer}, store, process_group=mesh.get_group())

    def load(mesh: DeviceMesh) -> None:
        model = net(mesh)
        optimizer = Otherwise(model.parameters())
        dcp.load({"net": model, "opt": optimizer}, store, process_group=mesh.get_group())
        (entry,) = optimizer.state.values()
        assert isinstance(entry["rows"], DTensor)
        assert entry["rows"].placements == (Shard(0),)
        assert entry["rows"].full_tensor().tolist() == torch.arange(24.0).view(6, 4).tolist()
        assert entry["whole"].placements == (Replicate(),)
        assert entry["whole"].stride() == entry["whole"].to_local().stride() == (1, 3)

    run_on_mesh((4,), save)
    run_on_mesh((2,), load)
