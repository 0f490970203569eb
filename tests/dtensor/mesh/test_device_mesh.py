"""Device meshes: abstract, of explicit groups, over a job, and around torch's."""

# pyright: reportPrivateUsage=false
# Some of torch's private names are those that people's code reads.

from __future__ import annotations

import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.dtensor import DeviceMesh, Mesh, Replicate, Shard
from dtckpt.dtensor.mesh.modes import active_mesh
from dtckpt.errors import PlacementError

from ...processes import run_processes
from ...python import run_python
from ..rank_meshes import run_on_mesh, scattered


def run_script(text: str, **env: str) -> str:
    """Run a script in a Python of its own; a default process group then stays there."""
    done = run_python("-W", "error", "-c", text, env=os.environ | env, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_abstract_mesh_answers_what_needs_no_rank() -> None:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size("tp")) == (2, (2, 2), 4, 2)
    assert mesh.mesh.tolist() == [[3, 1], [0, 2]]
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.coordinate_of(1) == (0, 1)
    other = DeviceMesh("cpu", Mesh((2, 2), ranks=(3, 1, 0, 2)))
    assert mesh.same_ranks_as(other)
    assert mesh != other
    same = DeviceMesh("cpu", Mesh((2, 2), ("dp", "tp"), (3, 1, 0, 2)))
    assert (mesh, hash(mesh)) == (same, hash(same))
    assert mesh != DeviceMesh("cuda", [[3, 1], [0, 2]])
    for question in (mesh.get_coordinate, mesh.get_rank, lambda: mesh["tp"]):
        with pytest.raises(PlacementError, match="has no rank"):
            question()


def test_a_mesh_with_a_rank_needs_groups_only_to_communicate() -> None:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"), rank=2)
    assert mesh.get_coordinate() == (1, 1)
    assert mesh["tp"].mesh.tolist() == [0, 2]
    assert mesh["tp", "dp"].mesh.tolist() == [[3, 0], [1, 2]]
    assert mesh["tp"] is mesh["tp"]
    assert mesh["dp", "tp"] is mesh
    assert mesh.flatten("all").mesh.tolist() == [3, 1, 0, 2]
    assert mesh.flatten().mesh_dim_names == ("dp_tp",)
    with pytest.raises(PlacementError, match=r"no process group over \('dp',\)"):
        mesh.get_group("dp")
    with pytest.raises(PlacementError, match="needs to be specified"):
        mesh.get_local_rank()
    with pytest.raises(PlacementError, match="Invalid mesh_dim_name"):
        mesh["pp"]
    outside = DeviceMesh("cpu", [0, 1], rank=7)
    assert outside.get_coordinate() is None
    with pytest.raises(PlacementError, match="rank 7 is not in mesh"):
        outside.get_local_rank()


@pytest.mark.parametrize(
    ("device", "ranks", "message"),
    [("cuda:0", [0, 1], "with index"), ("cpu", [0, 0], "different ranks"), ("cpu", [], "least")],
)
def test_impossible_meshes_are_refused(device: str, ranks: list[int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        DeviceMesh(device, ranks)


def test_parts_of_a_mesh_have_names_and_shapes() -> None:
    mesh = DeviceMesh("cpu", torch.arange(12).view(2, 3, 2), mesh_dim_names=("a", "b", "c"), rank=9)
    assert mesh.get_coordinate() == (1, 1, 1)
    flat = mesh["a", "b"].flatten()
    assert flat.mesh_dim_names == ("a_b",)
    assert flat.mesh.tolist() == [1, 3, 5, 7, 9, 11]
    assert mesh["a_b"] is flat
    assert flat.root is mesh
    assert mesh["c", "a_b"].mesh.tolist() == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert mesh["a"].flatten("a") is mesh["a"]
    whole = mesh.unflatten("b", (3, 1), ("x", "y"))
    assert (whole.shape, whole.mesh_dim_names) == ((2, 3, 1, 2), ("a", "x", "y", "c"))
    assert whole.get_coordinate() == (1, 1, 0, 1)
    assert whole is mesh.unflatten(1, [3, 1], ["x", "y"])
    assert DeviceMesh.concat([mesh["c"], mesh["a"]]) is mesh["c", "a"]
    part = mesh["b"].unflatten("b", (3, 1), ("x", "y"))
    assert (part.shape, part.mesh_dim_names, part.get_coordinate()) == ((3, 1), ("x", "y"), (1, 0))
    assert part is whole["x", "y"]
    assert DeviceMesh.concat([mesh["a"], part, mesh["c"]]) is whole
    assert DeviceMesh.concat([part, mesh["a"]]) is whole["x", "y", "a"]
    assert DeviceMesh.concat([mesh["c"], flat]) is mesh["c", "a_b"]
    assert DeviceMesh.concat([mesh["a"], mesh["b"], mesh["c"]]) is mesh
    for wrong, message in [
        (lambda: mesh["a", "a_b"], "axes in common"),
        (lambda: mesh["a", "c"].flatten("b"), "under the name 'b'"),
        (lambda: mesh["b", "c"].flatten("a_b"), "under the name 'a_b'"),
        (lambda: mesh.unflatten("b", (2, 2), ("x", "y")), "their product must be 3"),
        (lambda: mesh.unflatten("b", (3, 1), ("x",)), "same length"),
        (lambda: DeviceMesh.concat([mesh["a"], DeviceMesh("cpu", [9, 1], rank=9)]), "from one"),
        (lambda: DeviceMesh.concat([mesh["a"], flat]), "axes in common"),
        (
            lambda: DeviceMesh("cpu", [0, 1], backend_override={0: "gloo", "axis0": "a"}),
            "redundant",
        ),
    ]:
        with pytest.raises(PlacementError, match=message):
            wrong()


def test_names_that_torchs_code_reads() -> None:
    unnamed = DeviceMesh("cpu", [[3, 1], [0, 2]], rank=2)
    assert unnamed.mesh_dim_names is None
    assert unnamed["axis1"].mesh.tolist() == [0, 2]
    mesh: Any = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"), rank=2)
    torch_class: Any = TorchDeviceMesh
    assert isinstance(mesh, torch_class)
    assert mesh.mesh.dtype == torch.int32
    assert mesh["tp"]._get_root_mesh() is mesh
    assert mesh["dp", "tp"]._flatten("all") is mesh["all"]
    assert mesh._unflatten(0, (2, 1), ("x", "y")).shape == (2, 1, 2)
    assert DeviceMesh._concatenate([mesh["dp"], mesh["tp"]]) is mesh
    assert [part.mesh.tolist() for part in mesh._get_all_submeshes("tp")] == [[3, 1], [0, 2]]
    assert mesh._is_current_rank_part_of_mesh()
    theirs = mesh.to_torch()
    assert type(theirs) is TorchDeviceMesh
    assert theirs.mesh.tolist() == mesh.mesh.tolist()
    assert theirs.mesh_dim_names == ("dp", "tp")
    assert mesh._layout == theirs._layout
    assert DeviceMesh.from_torch(theirs) is mesh
    assert DeviceMesh.from_torch(mesh) is mesh
    assert mesh != theirs
    assert theirs != mesh
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = mesh.no_such_name


def test_a_mesh_is_pickled_as_what_it_is_and_finds_its_own_place() -> None:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"), rank=2)
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert again.mesh_dim_names == ("dp", "tp")
    assert not again.has_rank, "there is no job here"
    flat = pickle.loads(pickle.dumps(mesh.flatten("all")))
    assert (flat.mesh_dim_names, flat.mesh.tolist()) == (("all",), [3, 1, 0, 2])
    split = pickle.loads(pickle.dumps(mesh.unflatten(0, (2, 1), ("x", "y"))))
    assert split.mesh_dim_names == ("x", "y", "tp")
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy(mesh) is mesh


def test_explicit_groups() -> None:
    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        assert mesh.get_coordinate() == (rank // 3, rank % 3)
        assert [group.size() for group in mesh.get_all_groups()] == [2, 3]
        assert mesh.get_group(1).rank() == rank % 3
        with pytest.raises(PlacementError, match="groups of sizes"):
            DeviceMesh("cpu", mesh.layout_mesh, groups=mesh.get_all_groups()[:1])
        with pytest.raises(PlacementError, match="need a mesh"):
            DeviceMesh.from_group(mesh.get_all_groups(), "cpu")
        row = DeviceMesh.from_group(mesh.get_group(1), "cpu")
        assert row.shape == (3,)
        for sub, placements in [
            (mesh["axis1"], [Shard(0)]),
            (mesh.flatten(), [Shard(0)]),
            (mesh["axis1", "axis0"], [Shard(0), Shard(1)]),
            (mesh.unflatten(1, (1, 3), ("x", "y"))["axis0"], [Shard(0)]),
            (DeviceMesh.concat([mesh["axis1"], mesh["axis0"]]), [Shard(1), Shard(0)]),
        ]:
            tensor = scattered(torch.arange(14.0).view(7, 2), sub, placements)
            target = [Shard(1), Replicate()][: sub.ndim]
            moved = tensor.redistribute(placements=target)
            assert torch.equal(moved.full_tensor(), torch.arange(14.0).view(7, 2))

    run_on_mesh((2, 3), body)


def test_the_active_mesh_is_of_one_thread() -> None:
    mesh, inner = DeviceMesh("cpu", [0, 1], rank=0), DeviceMesh("cpu", [2])
    seen: list[object] = []
    with mesh:
        thread = threading.Thread(target=lambda: seen.append(active_mesh()))
        thread.start()
        thread.join()
        with inner:
            assert active_mesh() is inner
        assert active_mesh() is mesh
        theirs: Any = torch_tensor.zeros(2)
        assert theirs.device_mesh is mesh
    assert active_mesh() is None
    assert seen == [None]


def test_geometry_does_not_import_torch() -> None:
    code = (
        "import sys, dtckpt.dtensor as d; from dtckpt.dtensor import Layout, Mesh, Shard\n"
        "import dtckpt.dtensor.geometry.irregular\n"
        "assert len(d.__all__) == len(set(d.__all__)) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)


def test_every_public_name_is_there() -> None:
    import dtckpt.dtensor as package

    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None


SINGLE_PROCESS = """
import tempfile, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as tt
from torch.distributed.device_mesh import init_device_mesh as torch_init
import dtckpt.dtensor as dt
from dtckpt.errors import PlacementError

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dt.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
assert mesh.get_coordinate() == (0, 0) and mesh["tp"].get_group().size() == 1
try:
    dt.init_device_mesh("cpu", (2,))
except PlacementError as error:
    assert "the job has 1" in str(error)
else:
    raise SystemExit("a mesh larger than the job")

torch_mesh = torch_init("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
theirs = tt.distribute_tensor(torch.arange(6.0).view(3, 2), torch_mesh, [tt.Shard(0), tt.Shard(1)])
ours = dt.from_torch(theirs)
assert ours.placements == (dt.Shard(0), dt.Shard(1))
assert ours.device_mesh.get_group("tp") is torch_mesh.get_group("tp")
assert ours.device_mesh is dt.from_torch(theirs).device_mesh
ours.to_local()[0, 0] = 7
assert theirs.to_local()[0, 0] == 7
back = dt.to_torch(ours)
assert back.device_mesh is torch_mesh and back.placements == theirs.placements
assert back.to_local().data_ptr() == theirs.to_local().data_ptr()
made = dt.to_torch(dt.distribute_tensor(torch.ones(4), mesh, [dt.Shard(0), dt.Partial("max")]))
assert made.placements == (tt.Shard(0), tt.Partial("max")), made
assert dt.distribute_tensor(torch.ones(2), torch_mesh, [tt.Shard(0), dt.Replicate()]).shape == (2,)
import pickle
wrapped = dt.from_torch(tt.ones(2, device_mesh=torch_mesh, placements=[tt.Replicate()] * 2))
again = dt.from_torch(tt.ones(2, device_mesh=torch_mesh, placements=[tt.Replicate()] * 2))
assert wrapped.device_mesh is again.device_mesh
assert dt.to_torch(wrapped).device_mesh is torch_mesh
assert pickle.loads(pickle.dumps(torch_mesh)) == torch_mesh
from_group = dt.DeviceMesh.from_group(dist.group.WORLD, "cpu")
assert from_group.mesh.tolist() == [0]

state = {"a": dt.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [dt.Shard(0), dt.Shard(1)])}
with tempfile.TemporaryDirectory() as folder:
    dcp.save(state, checkpoint_id=folder)
    loaded = {"a": dt.distribute_tensor(torch.zeros(3, 2), mesh, [dt.Shard(1), dt.Replicate()])}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"].full_tensor(), torch.arange(6.0).view(3, 2))
    theirs = {"a": tt.zeros(3, 2, device_mesh=torch_mesh, placements=[tt.Replicate()] * 2)}
    dcp.load(theirs, checkpoint_id=folder)
    assert torch.equal(theirs["a"].full_tensor(), torch.arange(6.0).view(3, 2))
dist.destroy_process_group()
"""


def test_one_process_with_a_default_group() -> None:
    run_script(SINGLE_PROCESS)


ALONE = """
import torch, torch.distributed as dist
from dtckpt.dtensor import DeviceMesh, Shard, distribute_tensor, init_device_mesh
from dtckpt.errors import PlacementError

assert not DeviceMesh("cpu", [0, 1]).has_rank and not dist.is_initialized()
try:
    init_device_mesh("cpu", (2, 4))
except PlacementError as error:
    assert "torchrun --nproc-per-node=8" in str(error), error
else:
    raise SystemExit("eight processes of one")
mesh = init_device_mesh("cpu", (1, 1))
assert dist.get_world_size() == 1
assert distribute_tensor(torch.arange(3.0), mesh, [Shard(0)] * 2).sum().item() == 3
"""


def test_a_process_without_a_launcher_makes_its_own_group() -> None:
    run_script(ALONE)


LAUNCHED = """
import torch.distributed as dist
from dtckpt.dtensor import DeviceMesh

mesh = DeviceMesh("cpu", [0])
assert dist.is_initialized() and mesh.get_rank() == 0 and mesh.get_group().size() == 1
dist.destroy_process_group()
"""


def test_a_mesh_starts_what_a_launcher_has_prepared() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_script(LAUNCHED, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def test_groups_of_a_job() -> None:
    run_processes("tests.dtensor.mesh.group_ranks", 4)
