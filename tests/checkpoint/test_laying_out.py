"""Plain tensors with layouts beside them: ours, torch's, and torchtitan's by names of axes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Layout,
    Mesh,
    Packed,
    Partial,
    Ragged,
    Replicate,
    Shard,
)
from dtckpt.errors import LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ..dtensor.oracle import local_array
from ..ranks import RanksFailed, run_ranks

MESH = Mesh((2, 2), ("dp", "tp"))
WHOLE = torch.arange(48.0).reshape(8, 6)
spmd: Any = importlib.import_module("spmd_types")
S = spmd.S


@dataclass(frozen=True, slots=True)
class SpmdLayout:
    """The two attributes of torchtitan's class; torchtitan itself needs far too much."""

    axis_types: Mapping[Any, Any]
    partition_spec: Any = None


def part(layout: Layout, rank: int) -> torch.Tensor:
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    return torch.from_numpy(local_array(layout, coordinate, WHOLE.numpy()).copy())


LAYOUTS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "replicated": ((Replicate(), Replicate()), (Replicate(), TorchReplicate())),
    "ours": ((Replicate(), Shard(1)), (Replicate(), Shard(1))),
    "ordered": ((Shard(0, 1), Shard(0, 0)), (Shard(0, 1), Shard(0, 0))),
    "torch's": ((Shard(0), Replicate()), (TorchShard(0), TorchReplicate())),
    "types": ((Replicate(), Shard(1)), SpmdLayout({"dp": spmd.R, "tp": S(-1)})),
    "invariant": ((Shard(0), Replicate()), SpmdLayout({"tp": spmd.I, "dp": S(0)})),
    "spec": (
        (Shard(0), Shard(1)),
        SpmdLayout({"dp": spmd.V, "tp": spmd.V}, spmd.PartitionSpec("dp", "tp")),
    ),
    "spec with an order": (
        (Shard(0, 1), Shard(0, 0)),
        SpmdLayout({"dp": spmd.V, "tp": spmd.V}, spmd.PartitionSpec(("tp", "dp"), None)),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_plain_tensors_are_saved_and_filled_as_what_layouts_say(name: str) -> None:
    placements, given = LAYOUTS[name]
    layout = Layout(MESH, placements, tuple(WHOLE.shape))
    store = MemoryStore()

    def state_of(rank: int, tensor: torch.Tensor) -> tuple[Any, Any]:
        state = {"model": {"w": tensor, "scale": torch.ones(2)}, "step": 3}
        mesh = DeviceMesh("cpu", MESH, rank=rank) if rank % 2 else MESH
        return state, dcp.with_layouts(state, {"model/w": (mesh, given)}, rank=rank)

    def run(rank: int, group: Any) -> None:
        _, told = state_of(rank, part(layout, rank))
        dcp.save(told, store, process_group=group)
        into, told = state_of(rank, torch.zeros_like(part(layout, rank)))
        for read_once in (True, False):
            dcp.load(told, store, process_group=group, read_once=read_once)
            assert into["model"]["w"].equal(part(layout, rank)), "the tensor itself is filled"
            into["model"]["w"].zero_()
        other = DTensor.from_local(
            torch.zeros(2, 6), DeviceMesh("cpu", Mesh((4,)), rank=rank), [Shard(0)], shape=(8, 6)
        )
        dcp.load({"model": {"w": other}}, store, process_group=group, select="model/w")
        assert other.to_local().equal(WHOLE[2 * rank : 2 * rank + 2])

    run_ranks(4, run)
    saved = dcp.open(store)
    assert saved["model/w"].layout == layout
    assert saved["model/w"][...].equal(WHOLE)


@pytest.mark.parametrize(
    "placements",
    [
        (Ragged(0, (1, 7)), Shard(1)),
        (Packed(0, (5, 3)), Replicate()),
        (Shard(0), Packed(1, (4, 1, 1))),
    ],
    ids=str,
)
def test_a_layout_states_uneven_parts(placements: Any) -> None:
    layout, store = Layout(MESH, placements, (8, 6)), MemoryStore()

    def run(rank: int, group: Any) -> None:
        told = dcp.with_layouts([part(layout, rank)], {"0": layout}, rank=rank)
        dcp.save({"l": told}, store, process_group=group)
        into = torch.zeros_like(part(layout, rank))
        told = dcp.with_layouts({"l": [into]}, {"l/0": layout}, rank=rank)
        dcp.load(told, store, process_group=group)
        assert into.equal(part(layout, rank))

    run_ranks(4, run)
    assert dcp.open(store)["l/0"][...].equal(WHOLE)


def test_names_of_several_axes_and_of_none() -> None:
    mesh = Mesh((2, 2, 1), ("dp_replicate", "dp_shard", "tp"))
    told = dcp.with_layouts(
        {"w": torch.zeros(4, 6), "both": torch.zeros(1, 6), "scale": torch.ones(1)},
        {
            "w": (mesh, SpmdLayout({"dp": spmd.R, "tp": S(1)})),
            "scale": (mesh, SpmdLayout({})),
            "both": (mesh, SpmdLayout({"dp": spmd.V, "tp": spmd.V}, (("dp", "tp"), None))),
        },
        rank=0,
    )
    shard: Any = told["w"]
    assert shard.layout == Layout(mesh, (Replicate(),) * 3, (4, 6))
    shard = told["both"]
    assert shard.layout == Layout(mesh, (Shard(0), Shard(0), Replicate()), (4, 6))
    assert type(told["scale"]) is torch.Tensor


REFUSED: dict[str, tuple[Any, str]] = {
    "an axis that the mesh lacks": (SpmdLayout({"dp": spmd.R, "ep": S(0)}), r"\['ep'\] hold"),
    "an axis that is not told": (SpmdLayout({"dp": spmd.R}), "says of axis 'tp' nothing"),
    "varies": (SpmdLayout({"dp": spmd.R, "tp": spmd.V}), "'tp' that it varies, and not"),
    "no dim": (SpmdLayout({"dp": spmd.R, "tp": S(2)}), "cuts dim 2 of a tensor of 2 dims"),
    "no axis": (SpmdLayout({3: spmd.R}), "3 is no name of an axis"),
    "no type": (SpmdLayout({"dp": "R", "tp": spmd.R}), "'R' is none of R, I, V, P"),
    "unstated shape": ((Ragged(0, (4, 4)), Replicate()), "give a Layout, which states it"),
    "too few": ((Shard(0),), "'w'"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_layouts_that_tell_too_little_are_refused(why: str) -> None:
    given, message = REFUSED[why]
    with pytest.raises(LayoutMismatch, match=message):
        dcp.with_layouts({"w": torch.zeros(4, 6)}, {"w": (MESH, given)}, rank=0)


def test_what_has_no_such_tensor_is_refused() -> None:
    rows = Layout(Mesh((1,)), (Shard(0),), (4, 4))
    with pytest.raises(LayoutMismatch, match=r"the state has no tensor 'wieght'; .* Mend the name"):
        dcp.with_layouts({"w": torch.zeros(4, 4)}, {"w": rows, "wieght": rows})
    with pytest.raises(LayoutMismatch, match=r"the state has no tensor 'w'; .* 'model/w'"):
        dcp.with_layouts({"model": {"w": torch.zeros(4, 4)}}, {"w": rows})
    with pytest.raises(LayoutMismatch, match=r"model/weight.*within an object; give its state_d"):
        dcp.with_layouts({"model": torch.nn.Linear(4, 4)}, {"model/weight": rows})
    with pytest.raises(LayoutMismatch, match="w: a layout for a numpy array; give torch"):
        dcp.with_layouts({"w": np.zeros((4, 4))}, {"w": rows})
    with pytest.raises(LayoutMismatch, match="step: a layout for a int, not a tensor"):
        dcp.with_layouts({"step": 1}, {"step": rows})


def test_tensors_that_do_not_fit_their_layouts_are_refused() -> None:
    rows = Layout(Mesh((2,)), (Shard(0),), (4, 4))
    told = dcp.with_layouts({"w": torch.zeros(3, 4)}, {"w": rows}, rank=0)
    with pytest.raises(LayoutMismatch, match=r"the box \[0:2,0:4\], but its local shard has"):
        dcp.save(told, MemoryStore())
    terms = Layout(Mesh((1,)), (Partial(),), (4, 4))
    told = dcp.with_layouts({"w": torch.zeros(4, 4)}, {"w": terms})
    with pytest.raises(Unsavable, match="terms of a reduction"):
        dcp.save(told, MemoryStore())
    told = dcp.with_layouts({"w": torch.zeros(2, 4)}, {"w": rows}, rank=1)
    with pytest.raises(LayoutMismatch, match="Give the process group that the mesh was made from"):
        dcp.save(told, MemoryStore())  # rank 0 of its own


@pytest.mark.parametrize("read_once", [False, True])
def test_a_rank_that_is_not_told_is_refused(read_once: bool) -> None:
    rows, store = Layout(Mesh((2,)), (Shard(0),), (8, 6)), MemoryStore()
    dcp.save({"w": WHOLE}, store)

    def load(rank: int, group: Any) -> None:
        into = torch.zeros(4, 6)
        told = dcp.with_layouts({"w": into}, {"w": rows})  # rank 0, as there is no default group
        try:
            dcp.load(told, store, process_group=group, read_once=read_once)
        finally:
            assert not into.any()

    with pytest.raises(RanksFailed, match="rank 1 of the process group would hold"):
        run_ranks(2, load)
    into = torch.zeros(4, 6)
    dcp.load(dcp.with_layouts({"w": into}, {"w": rows}, rank=1), store)  # alone, as any rank
    assert into.equal(WHOLE[4:])


def test_what_knows_where_it_lies_stays_as_it_is() -> None:
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    known = DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(1)])
    told = dcp.with_layouts({"w": known}, {"w": Layout(Mesh((1,)), (Shard(0),), (4, 4))})
    assert told["w"] is known


def test_an_optimizer_finds_the_names_of_its_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    layout = Layout(Mesh((1,)), (Shard(0),), (2, 4))
    store = MemoryStore()
    model = dcp.with_layouts({"w": weight}, {"w": layout})
    dcp.save({"model": model, "optimizer": optimizer}, store)
    assert "optimizer/state/model/w/momentum_buffer" in dcp.open(store)
