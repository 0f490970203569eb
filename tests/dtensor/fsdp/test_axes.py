"""Which ranks share parameters: axes by name, smaller groups between passes, modules in a list."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import DeviceMesh, DTensor, PlacementError, Replicate, Shard
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.fsdp import DataParallelMeshDims, fully_shard
from dtckpt.dtensor.fsdp.state import states_below
from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.dtensor.rank_meshes import run_on_mesh

from .test_fully_shard import Net, assert_like, made, part, sharded, tokens_of, trained


def trained_whole(start: Net, steps: int = 3) -> Net:
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens, steps)
    return whole


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), ("node", "gpu"), DataParallelMeshDims(shard=("node", "gpu"))),
        ((2, 2), ("gpu", "node"), DataParallelMeshDims(shard="gpu", replicate="node")),
        ((2, 2), ("a", "b"), DataParallelMeshDims(replicate=("a", "b"))),
        ((2, 1, 2), ("a", "b", "c"), DataParallelMeshDims(shard=("b", "c"), replicate="a")),
    ],
)
def test_axes_by_name(shape: Any, names: Any, dims: DataParallelMeshDims) -> None:
    start = made()
    whole = trained_whole(start)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, dp_mesh_dims=dims)
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)
        names = (dims.shard,) if isinstance(dims.shard, str) else dims.shard or ()
        placements = model.embed.weight.placements
        assert sum(p.is_shard() for p in placements) == len(names)

    run_on_mesh(shape, body, names)


def test_axes_by_name_of_a_mesh_that_the_model_shares() -> None:
    start = made()
    whole = trained_whole(start)

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        dims = DataParallelMeshDims(shard="dp", replicate="hsdp")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        up = model.layers[0].up.weight
        assert up.device_mesh.mesh_dim_names == ("hsdp", "dp", "tp")
        assert up.placements == (Replicate(), Shard(0, order=1), Shard(0, order=0))
        trained(model, lambda tokens: part(tokens, mesh["hsdp", "dp"]))
        assert_like(model, whole)

    run_on_mesh((1, 2, 2), body, ("hsdp", "dp", "tp"))


def test_a_smaller_group_gathers_again() -> None:
    start = made()
    whole = trained_whole(start)
    dims = DataParallelMeshDims(shard=("node", "gpu"))

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, dp_mesh_dims=dims, reshard_after_forward=2)
        units = [state.unit for state in states_below(model)]
        loss = model(part(tokens_of(0), mesh)).square().mean()
        for unit in units:
            assert not unit.is_whole
            for one in unit.held:
                own = one.about.whole.shape.numel()
                assert one.kept is not None
                rows = one.about.whole.shape[0] if one.about.dim == 0 else 1
                assert one.kept.numel() <= -(-rows // 2) * (own // max(rows, 1))
        assert list(model.state_dict()) == list(whole.state_dict())
        assert all(
            p.placements[:2] == (Shard(0), Shard(0)) or not p.ndim for p in model.parameters()
        )
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == 2 * len(units)
        model.zero_grad()
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)
        model.zero_grad()
        loss = model(part(tokens_of(0), mesh)).square().mean()
        model.set_reshard_after_forward(True)
        assert all(one.kept is None for unit in units for one in unit.held)
        loss.backward()
        model(part(tokens_of(0), mesh))
        assert all(one.kept is None for unit in units for one in unit.held)
        with torch.no_grad():
            model.set_reshard_after_forward(2)
            model(part(tokens_of(0), mesh))
        assert all(one.kept is None for unit in units for one in unit.held)

    run_on_mesh((2, 2), body, ("node", "gpu"))


def test_bytes_of_a_smaller_group_are_fewer() -> None:
    dims = DataParallelMeshDims(shard=("node", "gpu"))

    def body(mesh: DeviceMesh) -> None:
        received: dict[Any, int] = {}
        for reshard in (True, 2):
            model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
            for layer in model:
                fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
            out = model(torch.ones(2, 64)).sum()
            with CommDebugMode() as comm:
                out.backward()
            received[reshard] = sum(comm.get_comm_bytes().values())
        weights = 2 * 64 * 64 * 4
        fewer = received[True] - received[2]
        assert abs(fewer - weights // 4) < 300  # 3/4 of the weights before, 1/2 after

    run_on_mesh((2, 2), body, ("node", "gpu"))


@pytest.mark.parametrize("number", [3, 0, -2, 8])
def test_numbers_that_do_not_fit_are_refused(number: int) -> None:
    def body(mesh: DeviceMesh) -> None:
        layer = nn.Linear(4, 4)
        dims = DataParallelMeshDims(shard=("node", "gpu"))
        with pytest.raises(PlacementError, match=r"must divide the 4 ranks .*one of \[1, 2, 4\]"):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=number)
        assert type(layer) is nn.Linear
        assert not isinstance(layer.weight, DTensor)

    run_on_mesh((2, 2), body, ("node", "gpu"))


@pytest.mark.parametrize(("number", "same"), [(1, False), (4, True)])
def test_one_rank_and_all_ranks_are_numbers_as_in_torch(number: int, same: bool) -> None:
    start = made()
    whole = trained_whole(start)
    dims = DataParallelMeshDims(shard=("node", "gpu"))

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, dp_mesh_dims=dims, reshard_after_forward=number)
        units = [state.unit for state in states_below(model)]
        model(part(tokens_of(0), mesh))
        assert all(unit.reshard_after_forward is same for unit in units)
        assert all(unit.is_whole is not same for unit in units)
        model.zero_grad()
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)
        model.set_reshard_after_forward(4)
        assert all(unit.reshard_after_forward is True for unit in units)

    run_on_mesh((2, 2), body, ("node", "gpu"))


class Pairs(nn.Module):
    """An embedding and a head at the ends of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, dtype=torch.float64)
        self.middle = nn.Linear(6, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 9, dtype=torch.float64)
        self.skips_head = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        return x if self.skips_head else self.head(x)


def pairs() -> Pairs:
    torch.manual_seed(0)
    return Pairs()


def pairs_on(mesh: DeviceMesh, start: Pairs) -> Any:
    model: Any = copy.deepcopy(start)
    both = [model.embed, model.head]
    assert fully_shard(both, mesh=mesh) is both
    return fully_shard(model, mesh=mesh)


def test_modules_in_a_list_share_their_collectives() -> None:
    start = pairs()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        model = pairs_on(mesh, start)
        with CommDebugMode() as comm:
            loss = model(part(tokens_of(0), mesh)).square().mean()
        assert comm.get_total_counts() == 2
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == 3  # the root has kept its own
        model.zero_grad()
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)
        assert len(list(states_below(model))) == 2

    run_on_mesh((2,), body)


def test_a_module_in_a_list_that_does_not_run() -> None:
    start = pairs()
    start.skips_head = True
    whole = copy.deepcopy(start)
    for step in range(2):
        whole(tokens_of(step)).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model = pairs_on(mesh, start)
        for step in range(2):
            model(part(tokens_of(step), mesh)).square().mean().backward()
            assert not any(state.unit.is_whole for state in states_below(model))
        wanted = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if wanted[name].grad is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)
        model.skips_head = False
        assert model(part(tokens_of(0), mesh)).shape[-1] == 9

    run_on_mesh((2,), body)


def test_lists_that_do_not_fit_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = pairs()
        refused: list[tuple[Any, str]] = [
            ([], "got none"),
            ([model, model.head], "none may be in another one"),
            ([model.head, model.head], "come twice"),
            ([nn.ModuleList([nn.Linear(2, 2)])], "do not implement forward"),
        ]
        for modules, message in refused:
            with pytest.raises(PlacementError, match=message):
                fully_shard(modules, mesh=mesh)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

        class Runs(nn.ModuleList):
            def forward(self, x: Tensor) -> Tensor:
                return self[0](x)

        assert fully_shard(Runs([nn.Linear(2, 2)]), mesh=mesh)(torch.ones(1, 2)).shape == (1, 2)
        with pytest.raises(PlacementError, match=r"dp_mesh_dims=Data.*shard='dp'"):
            fully_shard(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [[[0]]], rank=0))
        with pytest.raises(PlacementError, match="needs axes"):
            DataParallelMeshDims()

    run_on_mesh((1,), body)


@pytest.mark.parametrize("whole_model", [True, False])
def test_copies_are_sharded_modules_of_their_own(whole_model: bool) -> None:
    start = pairs()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        first: Any = pairs_on(mesh, start) if whole_model else nn.Sequential(pairs_on(mesh, start))
        first(part(tokens_of(0), mesh))
        second: Any = copy.deepcopy(first)
        before = {name: p.full_tensor().clone() for name, p in first.named_parameters()}
        trained(second, lambda tokens: part(tokens, mesh))
        inner = second if whole_model else second[0]
        assert_like(inner, whole)
        assert {id(s) for s in states_below(first)}.isdisjoint(id(s) for s in states_below(second))
        for name, parameter in first.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name])
        assert list(second.state_dict()) == list(first.state_dict())

    run_on_mesh((2,), body)


def test_copies_within_a_pass_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        class Copies(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                copy.deepcopy(self)
                return self.lin(x)

        with pytest.raises(PlacementError, match="copied between passes"):
            fully_shard(Copies(), mesh=mesh)(torch.ones(1, 2))

    run_on_mesh((1,), body)


def test_ranks_that_run_different_modules_are_told() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        for layer in model.values():
            fully_shard(layer, mesh=mesh)
        which = "a" if mesh.get_local_rank() == 0 else "b"
        with pytest.raises(PlacementError, match=r"different modules.*units \[0, 1\]"):
            model[which](torch.ones(1, 4))

    run_on_mesh((2,), body)
