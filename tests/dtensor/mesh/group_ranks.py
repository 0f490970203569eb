"""Four ranks of a job: the process groups of meshes, by name, in order, and aborted."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from dtckpt.dtensor import DeviceMesh, DTensor, Shard, distribute_tensor, init_device_mesh
from dtckpt.dtensor.comm.groups import can_keep_order
from dtckpt.errors import MeshDimError, PlacementError

from ...processes import join_group, leave_group


def check_names() -> None:
    """Groups are found by the names of flattened dims, and told apart by what they are for."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    rank = dist.get_rank()
    assert mesh.get_group("dp").group_desc == "mesh_dp"
    flat = mesh["cp", "tp"]._flatten("cp_tp")  # pyright: ignore[reportPrivateUsage]
    assert mesh.get_group("cp_tp") is flat.get_group()
    assert mesh["dp"].get_group("cp_tp") is flat.get_group()
    assert mesh.get_local_rank("cp_tp") == flat.get_local_rank() == rank % 2
    assert mesh.size("cp_tp") == 2
    assert flat.get_group().group_desc == "mesh_cp_tp"
    unnamed = init_device_mesh("cpu", (2, 2))
    assert unnamed.get_group(1).group_desc == "mesh_dim_1"
    for name in ("pp", "dp_cp"):
        with pytest.raises(MeshDimError, match=f"{name}.*dp"):
            mesh.get_group(name)
        with pytest.raises(KeyError):
            mesh.get_local_rank(name)


def check_order() -> None:
    """Groups keep the order of the mesh where that is asked for."""
    ranks = [2, 0, 3, 1]
    usual = DeviceMesh("cpu", ranks)
    assert dist.get_process_group_ranks(usual.get_group()) == [0, 1, 2, 3]
    if not can_keep_order():
        with pytest.raises(PlacementError, match="preserve_rank_order"):
            DeviceMesh("cpu", ranks, preserve_rank_order=True).get_group()
        return
    mesh = DeviceMesh("cpu", ranks, preserve_rank_order=True, mesh_dim_names=("x",))
    assert dist.get_process_group_ranks(mesh.get_group()) == ranks
    assert mesh != DeviceMesh("cpu", ranks, mesh_dim_names=("x",))
    whole = torch.arange(10.0)
    made = distribute_tensor(whole, mesh, [Shard(0)])
    assert made.to_local().equal(whole.chunk(4)[ranks.index(dist.get_rank())])
    assert made.full_tensor().equal(whole)
    assert (made + made).sum().item() == 90
    assert mesh.to_torch().get_group() is mesh.get_group()
    two = DeviceMesh("cpu", [[3, 1], [2, 0]], preserve_rank_order=True, mesh_dim_names=("a", "b"))
    row = [3, 1] if dist.get_rank() in (3, 1) else [2, 0]
    assert dist.get_process_group_ranks(two["b"].get_group()) == row
    again = pickle.loads(pickle.dumps(two))
    assert again == two
    assert dist.get_process_group_ranks(again["b"].get_group()) == row


def check_backends() -> None:
    """A backend for each dim, as torch's DeviceMesh takes them."""
    given = ((None, None), ("gloo", None))
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], backend_override=given)
    assert dist.get_backend(mesh.get_group(1)) == "gloo"
    with pytest.raises(PlacementError, match="2 entries, got 1"):
        DeviceMesh("cpu", [[0, 1], [2, 3]], backend_override=given[:1])


def check_abort() -> None:
    """After an abort nothing is sent over the groups of a mesh, and other meshes work."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4,))
    local = torch.full((2,), float(dist.get_rank()))
    made = DTensor.from_local(local, mesh["tp"], [Shard(0)], shape=(4,))
    assert made.full_tensor().shape == (4,)
    with pytest.raises(RuntimeError, match="the root mesh"):
        mesh["tp"].abort()
    mesh.abort()
    with pytest.raises(PlacementError, match="were aborted"):
        made.full_tensor()
    with pytest.raises(PlacementError, match="were aborted"):
        mesh.get_group("dp")
    assert distribute_tensor(torch.arange(4.0), other, [Shard(0)]).full_tensor().sum() == 6


if __name__ == "__main__":
    join_group()
    check_names()
    check_order()
    check_backends()
    check_abort()
    leave_group()
