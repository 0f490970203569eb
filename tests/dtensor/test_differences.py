"""What is decided otherwise than in torch: a test for each row of the table in docs/dtensor.md."""

# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import copy
import importlib
import io
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard as TorchShard

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.experimental import local_map
from dtckpt.dtensor.fsdp import MixedPrecisionPolicy, fully_shard
from dtckpt.dtensor.mesh import device_mesh
from dtckpt.dtensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from dtckpt.errors import MeshDimError, PlacementError, UnsupportedOp

from .rank_meshes import run_on_mesh, run_on_meshes, scattered

PAGE = Path(__file__).parents[2] / "docs" / "dtensor.md"


def test_errors_are_of_the_kinds_that_torch_raises_and_say_more() -> None:
    mesh = DeviceMesh("cpu", Mesh((2, 2), ("dp", "tp")), rank=0)
    for kind in (KeyError, IndexError, RuntimeError, ValueError, MeshDimError):
        with pytest.raises(kind):
            _ = mesh["pp"]
    for kind in (RuntimeError, ValueError, AssertionError, PlacementError):
        with pytest.raises(kind):
            mesh.get_local_rank()
    with pytest.raises(MeshDimError) as failure:
        mesh.get_group("pp")
    assert str(failure.value).startswith("Invalid mesh_dim_name 'pp'"), "as it is, not quoted"
    alone = DeviceMesh("cpu", Mesh((1,)), rank=0)
    double, single = torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 0)
    assert torch.baddbmm(double, double, single).shape == (1, 1, 0)
    with pytest.raises(RuntimeError, match="dtypes must be the same"):
        torch.baddbmm(*[DTensor.from_local(t, alone) for t in (double, double, single)])


def test_parts_of_a_mesh_are_taken_in_any_order() -> None:
    mesh = DeviceMesh("cpu", Mesh((2, 1, 2), ("a", "b", "c")), rank=0)
    assert mesh["c", "a"].mesh_dim_names == ("c", "a")


def test_several_mesh_dims_change_by_one_collective() -> None:
    def body(mesh: DeviceMesh) -> None:
        made = scattered(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(0)])
        with CommDebugMode() as comm:
            made.redistribute(placements=[Shard(1), Shard(1)])
        assert comm.get_total_counts() == 1

    run_on_mesh((2, 2), body)


def test_shards_change_dims_by_an_all_to_all_on_cpus() -> None:
    def body(mesh: DeviceMesh) -> None:
        made = scattered(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        with CommDebugMode() as comm:
            made.redistribute(placements=[Shard(1)])
        assert comm.get_comm_counts() == {"all_to_all": 1}

    run_on_mesh((2,), body)


def test_histograms_reduce_their_limits() -> None:
    values = torch.arange(4096.0)

    def body(mesh: DeviceMesh) -> None:
        made = scattered(values, mesh, [Shard(0)])
        with CommDebugMode() as comm:
            found = cast(DTensor, made.histc())
        assert comm.get_comm_counts() == {"all_reduce": 2}
        assert sum(comm.get_comm_bytes().values()) < 100
        assert found.full_tensor().equal(values.histc())

    run_on_mesh((2,), body)


def test_means_of_losses_count_what_every_rank_has() -> None:
    logits, target = torch.arange(12.0).view(4, 3).sin(), torch.tensor([0, -100, -100, -100])

    def body(mesh: DeviceMesh) -> None:
        rows, classes = (scattered(one, mesh, [Shard(0)]) for one in (logits, target))
        with CommDebugMode() as comm:
            found = cast(DTensor, F.cross_entropy(rows, classes))
        assert comm.get_comm_counts() == {"all_reduce": 1}
        torch.testing.assert_close(found.full_tensor(), F.cross_entropy(logits, target))

    run_on_mesh((2,), body)


def test_partials_are_reduced_before_a_tensor_of_one_element_scales_them() -> None:
    def body(mesh: DeviceMesh) -> None:
        terms = DTensor.from_local(torch.tensor([-1.0 + 4 * mesh.get_rank()]), mesh, [Partial()])
        with CommDebugMode() as comm:
            made = cast(DTensor, terms * torch.tensor(float("inf")))
        assert comm.get_total_counts() == 1
        assert made.full_tensor().tolist() == [float("inf")], "the sum of terms would be a nan"
        assert cast(DTensor, terms * 2.0).placements == (Partial(),)

    run_on_mesh((2,), body)


def test_what_torch_refuses_works() -> None:
    table, indices = torch.arange(12.0).view(4, 3), torch.tensor([3, 1])

    def body(mesh: DeviceMesh) -> None:
        columns, at = scattered(table, mesh, [Shard(1)]), distribute_tensor(indices, mesh)
        found = cast(DTensor, F.embedding(at, columns, max_norm=2.0))
        wanted = F.embedding(indices, table.clone(), max_norm=2.0)
        torch.testing.assert_close(found.full_tensor(), wanted)
        rows = scattered(table, mesh, [Shard(0)])
        assert cast(DTensor, rows.view(-1, 12)).full_tensor().equal(table.view(-1, 12))
        terms = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        dropped = cast(DTensor, F.dropout(terms, 0.5)).full_tensor()
        assert all(value in (0.0, 4.0) for value in dropped.tolist())

    run_on_mesh((2,), body)


def test_collectives_of_torch_take_no_distributed_tensors() -> None:
    def body(mesh: DeviceMesh) -> None:
        made = distribute_tensor(torch.ones(2), mesh)
        with pytest.raises(PlacementError, match="a collective of torch takes the tensors"):
            torch.ops._c10d_functional.all_reduce(made, "sum", "group")

    run_on_mesh((2,), body)


def test_names_of_the_insides_of_torch_are_not_there() -> None:
    assert not hasattr(fully_shard, "state")
    assert not hasattr(CommDebugMode(), "advanced_module_tracker")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dtckpt.checkpoint.dcp._extension")
    arguments: Any = {"_init_backend": False}
    with pytest.raises(TypeError, match="_init_backend"):
        DeviceMesh("cpu", [0], rank=0, **arguments)


def test_results_lie_where_less_is_moved() -> None:
    def body(mesh: DeviceMesh) -> None:
        rows = scattered(torch.arange(8.0), mesh, [Shard(0)])
        whole = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
        made = cast(DTensor, whole * rows)
        assert made.placements == (Shard(0),)
        assert cast(DTensor, rows.cumsum(0)).placements == (Shard(0),)
        matrix = scattered(torch.arange(32.0).view(4, 8), mesh, [Shard(1)])
        with CommDebugMode() as comm:
            assert cast(DTensor, matrix[:, 4:]).placements == (Ragged(1, (0, 4)),)
        assert comm.get_total_counts() == 0
        at = tuple(distribute_tensor(torch.tensor(i), mesh) for i in (1, 2))
        put = torch.index_put(matrix, at, distribute_tensor(torch.tensor(5.0), mesh))
        assert cast(DTensor, put).placements == (Shard(1),)

    run_on_mesh((2,), body)


def test_sizes_are_exchanged_where_shape_is_not_given() -> None:
    def body(mesh: DeviceMesh) -> None:
        local = torch.ones(2, dtype=[torch.float32, torch.float64][mesh.get_rank()])
        with pytest.raises(PlacementError, match="different dtypes"):
            DTensor.from_local(local, mesh, [Shard(0)])

    run_on_mesh((2,), body)


def test_ranks_outside_of_the_mesh_pass_the_shape() -> None:
    def body(_: DeviceMesh, mesh: DeviceMesh) -> None:
        outside = mesh.get_coordinate() is None
        if outside:
            with pytest.raises(PlacementError, match="Pass shape="):
                DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        made = DTensor.from_local(torch.ones(0 if outside else 2), mesh, [Shard(0)], shape=(4,))
        assert made.shape == (4,)

    run_on_meshes(3, [Mesh((3,)), Mesh((2,))], body)


def test_to_local_is_there_when_it_returns() -> None:
    def body(mesh: DeviceMesh) -> None:
        made = scattered(torch.arange(8.0), mesh, [Shard(0)])
        local = made.redistribute(async_op=True).to_local()
        assert type(local) is Tensor
        assert local.equal(torch.arange(8.0))

    run_on_mesh((2,), body)


def test_pickles_are_of_the_rank_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, of_second = torch.arange(10.0).reshape(5, 2), b""
    for rank in (1, 0):
        monkeypatch.setattr(device_mesh, "rank_here", lambda rank=rank: rank)
        mesh = DeviceMesh("cpu", Mesh((2,), ("dp",)), rank=rank)
        rows = DTensor.from_local(whole[3 * rank :][:3], mesh, [Shard(0)], shape=(5, 2))
        given: dict[str, Any] = {
            "parameter": nn.Parameter(rows),
            "transposed": rows.T,
            "column": DTensor.from_local(whole, mesh, [Replicate()], shape=(5, 2))[:, 1],
            "ragged": DTensor.from_local(
                whole[rank : 1 + 2 * rank], mesh, [Ragged(0, (1, 2))], shape=(3, 2)
            ),
            "terms": DTensor.from_local(whole * rank, mesh, [Partial()], shape=(5, 2)),
        }
        file = io.BytesIO()
        torch.save(given, file)
        for weights_only in (True, False):
            file.seek(0)
            found = torch.load(file, weights_only=weights_only)
            for name, value in given.items():
                again = found[name]
                assert isinstance(again, DTensor)
                assert again.placements == value.placements
                assert again.device_mesh == value.device_mesh
                assert (again.shape, again.stride()) == (value.shape, value.stride())
                assert again.to_local().equal(value.to_local())
            assert isinstance(found["parameter"], nn.Parameter)
            assert found["parameter"].requires_grad
            assert not found["transposed"].requires_grad
        of_second = of_second or pickle.dumps(rows)
    with pytest.raises(PlacementError, match=r"part at \(1,\) of .*, and this rank is at \(0,\)"):
        pickle.loads(of_second)


def test_a_partial_is_filled_with_the_value() -> None:
    def body(mesh: DeviceMesh) -> None:
        terms = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        assert cast(DTensor, terms.fill_(3.0)).full_tensor().tolist() == [3.0, 3.0]

    run_on_mesh((2,), body)


def test_classes_may_be_sharded_outside_of_loss_parallel() -> None:
    def body(mesh: DeviceMesh) -> None:
        logits, target = torch.arange(12.0).view(3, 4), torch.tensor([0, 3, 1])
        split = scattered(logits, mesh, [Shard(1)])
        found = F.cross_entropy(split, distribute_tensor(target, mesh, [Replicate()]))
        torch.testing.assert_close(
            cast(DTensor, found).full_tensor(), F.cross_entropy(logits, target)
        )
        rows = scattered(logits, mesh, [Shard(0)])
        with loss_parallel():
            found = F.cross_entropy(rows, distribute_tensor(target, mesh, [Replicate()]))
        torch.testing.assert_close(
            cast(DTensor, found).full_tensor(), F.cross_entropy(logits, target)
        )

    run_on_mesh((2,), body)


def test_names_of_a_plan_that_match_nothing_are_errors() -> None:
    mesh = DeviceMesh("cpu", [0], rank=0)
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PlacementError, match="'other'"):
        parallelize_module(net, mesh, {"other": ColwiseParallel()})
    parallelize_module(net, mesh, {"other": ColwiseParallel()}, strict=False)


def test_gradients_of_leaves_lie_where_the_leaves_do() -> None:
    def body(mesh: DeviceMesh) -> None:
        weight = distribute_tensor(torch.ones(3, requires_grad=True), mesh, [Replicate()])
        rows = scattered(torch.ones(4, 3), mesh, [Shard(0)])
        (rows @ weight).sum().backward()
        assert cast(DTensor, weight.grad).placements == (Replicate(),)

    run_on_mesh((2,), body)


def test_local_map_takes_what_lies_anyhow_for_none_and_one_mesh() -> None:
    mesh, other = (DeviceMesh("cpu", Mesh((1,), (name,)), rank=0) for name in "ab")
    two = DeviceMesh("cpu", Mesh((1, 1)), rank=0)
    given = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    made = local_map(lambda x: x, ([Shard(0)],), (None,))(given)
    assert cast(DTensor, made).placements == (Shard(0),)
    apart = distribute_tensor(torch.ones(2), two, [Shard(0), Replicate()])
    with pytest.raises(PlacementError, match="redistribute it to one mesh, or say device_mesh="):
        local_map(lambda x, y: x + y, ([Shard(0)],))(given, apart)
    assert given.device_mesh.same_ranks_as(other)
    with pytest.raises(UnsupportedOp, match="run_check=True"):
        local_map(lambda x: x, ([Shard(0)],), spmd_types=True)


def test_sharded_modules_are_copied_and_have_scalars() -> None:
    mesh = DeviceMesh("cpu", [0], rank=0)
    net = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert copy.deepcopy(net) is not net
    scalar = fully_shard(Scaled(), mesh=mesh)
    assert scalar(torch.ones(2)).tolist() == [1.0, 1.0], "scalars are whole on every rank"
    image = torch.arange(16.0).view(1, 2, 2, 4)
    conv: Any = nn.Conv2d(2, 3, 1)
    conv.to(memory_format=torch.channels_last)  # parameters with strides of their own
    wanted = conv(image)
    unnamed = DeviceMesh("cpu", [[0]], rank=0)
    torch.testing.assert_close(fully_shard(conv, mesh=unnamed)(image), wanted)


def test_gradients_of_half_precision_are_summed_in_single() -> None:
    def body(mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        net = fully_shard(nn.Linear(1, 1, bias=False), mesh=mesh, mp_policy=policy)
        given = 1024.0 if mesh.get_rank() == 0 else 3.0
        net(torch.tensor([[given]])).sum().backward()
        total = 4 * cast(DTensor, net.weight.grad).full_tensor().item()
        assert abs(total - 1033) <= 4, "terms of 3 are lost where each sum is rounded"

    run_on_mesh((4,), body)


class Scaled(nn.Module):
    """A module with a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_placements_of_torch_are_equal_to_ours_and_no_instances() -> None:
    theirs: Any = TorchShard(1)
    assert Shard(1) == theirs
    assert not isinstance(Shard(1), TorchShard)


def test_plain_tensors_must_be_the_same_on_all_ranks() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        added: Any = tensor + torch.ones(4)
        assert torch.equal(added.full_tensor(), torch.full((4,), 2.0))
        with pytest.raises(PlacementError, match="differs between ranks"):
            torch.add(tensor, torch.full((4,), float(mesh.get_rank())))

    run_on_mesh((2,), body)


def test_every_row_of_the_table_names_its_test() -> None:
    table = PAGE.read_text().split("## Differences from torch")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`test_" in line]
    named = {cell.strip(" `") for line in rows for cell in line.split("|")[-2].split(",")}
    own = {name for name in globals() if name.startswith("test_")}
    assert named == own - {"test_every_row_of_the_table_names_its_test"}
