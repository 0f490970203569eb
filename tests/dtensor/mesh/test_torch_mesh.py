"""What torch's code finds on a mesh of ours, and what it leaves behind."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from dtckpt.dtensor import DeviceMesh, Mesh
from dtckpt.dtensor import torch_private as private
from dtckpt.dtensor.mesh.device_mesh import _taken_again
from dtckpt.errors import PlacementError

from ...python import run_python


def alone(*names: str) -> DeviceMesh:
    """Return a mesh of one rank."""
    return DeviceMesh("cpu", Mesh((1,) * len(names), names), rank=0)


def of_torch(mesh: DeviceMesh) -> Any:
    """Return a DTensor of torch on a mesh of ours."""
    cut = [TorchShard(axis % 2) for axis in range(mesh.ndim)]
    return torch_distribute(torch.ones(4, 3), mesh, cut, src_data_rank=None)


@pytest.mark.parametrize("name", ["_repr_html_", "_ipython_display_", "_no_such_name", "no_name"])
def test_unknown_names_are_no_attributes_and_make_no_mesh_of_torch(name: str) -> None:
    mesh = alone("a", "b")
    with pytest.raises(AttributeError, match=name):
        getattr(mesh, name)
    assert not hasattr(mesh["a"], name)
    assert mesh.their_mesh() is mesh["a"].their_mesh() is None


@pytest.mark.parametrize("name", private.MESH_FIELDS)
def test_fields_are_those_of_torchs_mesh(name: str) -> None:
    mesh = alone("a", "b")
    nothing = object()
    wanted = getattr(mesh.to_torch(), name, nothing)
    assert getattr(mesh, name, nothing) is wanted or getattr(mesh, name) == wanted


def test_torch_has_no_other_fields() -> None:
    mesh = alone("a", "b")
    found = {*vars(mesh.to_torch()), *vars(mesh["a"].to_torch())}
    assert not [name for name in found if not hasattr(mesh, name)]


def test_the_root_is_ours() -> None:
    mesh = alone("a", "b")
    assert mesh["a"]._root_mesh is mesh["a"]._get_root_mesh() is mesh
    assert mesh._root_mesh is None


def test_results_of_torch_lie_on_axes_of_the_right_name() -> None:
    mesh = alone("a", "b")
    assert mesh["a"] != mesh["b"]
    assert mesh["a"].same_ranks_as(mesh["b"])
    for name in ("a", "b"):  # torch remembers results by the meshes of what they are made of
        result: Any = of_torch(mesh[name]) + 1
        assert result.device_mesh is mesh[name]
        assert result.device_mesh.mesh_dim_names == (name,)


def test_tensors_of_torch_on_our_meshes_are_loaded_by_weights_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    mesh = alone("a", "b")
    for used in (mesh, mesh["b"], mesh["a", "b"].flatten("c"), mesh.unflatten(0, (1, 1), "xy")):
        file = io.BytesIO()
        torch.save({"w": of_torch(used), "mesh": used}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert loaded["mesh"] == loaded["w"].device_mesh == used
        assert torch.equal(loaded["w"].to_local(), torch.ones(4, 3))


def test_a_file_calls_no_other_method() -> None:
    with pytest.raises(PlacementError, match="not a way to take a mesh"):
        _taken_again(alone("a"), "__setattr__", ("x", 1))


def test_a_mesh_that_outlives_the_modules_is_forgotten_quietly() -> None:
    program = (
        "import sys\n"
        "from dtckpt.dtensor import DeviceMesh\n"
        "DeviceMesh('cpu', [0], rank=0).to_torch()\n"
        "sys.kept = DeviceMesh  # so that the names of its modules are cleared one by one\n"
    )
    run = run_python("-c", program, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Exception ignored" not in run.stderr
