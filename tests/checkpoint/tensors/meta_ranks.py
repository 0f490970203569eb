"""Four ranks load modules that FSDP2 and tensor parallel made on the meta device.

Run by test_meta_modules, one process per rank. Every comparison is of full tensors, on every rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh as OurMesh
from dtckpt.dtensor import DTensor, Mesh, Replicate, Shard

from ...processes import join_group, leave_group
from ..fsdp_ranks import Model, full, tensor_parallel


def on_meta() -> Model:
    """The model without memory."""
    with torch.device("meta"):
        return Model(0)


def check(model: nn.Module, expected: dict[str, torch.Tensor], what: str) -> None:
    """Raise unless the module has these parameters and buffers, and can be trained."""
    for name, value in model.state_dict().items():
        if not torch.equal(full(value), expected[name]):
            raise AssertionError(f"{what}: {name} differs")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if torch.equal(full(model.state_dict()["up.weight"]), expected["up.weight"]):
        raise AssertionError(f"{what}: the steps changed nothing")


def read_once_of_ours(path: str, expected: dict[str, torch.Tensor]) -> None:
    """Our DTensors, whose groups are made when they are needed."""
    mesh = OurMesh("cpu", Mesh((2, 2)))
    placements = (Replicate(), Shard(0))
    weight = expected["up.weight"]
    rows = weight.shape[0] // 2
    tensor = DTensor.from_local(
        torch.zeros(rows, weight.shape[1]), mesh, placements, shape=tuple(weight.shape)
    )
    report = dcp.load(
        {"w": tensor}, path, rename={"w": "up.weight"}, select="up.weight", read_once=True
    )
    if not report.read_once or not torch.equal(full_of_ours(tensor), weight):
        raise AssertionError(f"ours: {report.read_once_reason}")


def full_of_ours(tensor: DTensor) -> torch.Tensor:
    """The whole tensor on this rank."""
    return tensor.full_tensor()


def main(path: str) -> None:
    """Save plain, load as shards."""
    plain = Model(7)
    expected = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    dcp.save(dict(expected), path)
    rename = {"model": ""}

    sharded = on_meta()
    mesh: DeviceMesh = init_device_mesh("cpu", (4,))
    fully_shard(sharded.up, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    state: dict[str, Any] = {"model": sharded}
    dcp.load(state, path, rename=rename)
    check(sharded, expected, "FSDP2")

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut = tensor_parallel(on_meta(), grid["tp"])
    fully_shard(cut, mesh=grid["dp"])
    report = dcp.load({"model": cut}, path, rename=rename, device="cpu")
    check(cut, expected, "FSDP2 of tensor parallel")
    if not isinstance(cut.up.weight, TorchDTensor) or not report.resharded:
        raise AssertionError("the parameters are no longer distributed")

    hybrid = on_meta()
    fully_shard(hybrid, mesh=grid)
    report = dcp.load({"model": hybrid}, path, rename=rename, read_once=True)
    check(hybrid, expected, "HSDP")
    if not report.read_once or report.bytes_received == 0:
        raise AssertionError(f"HSDP: {report}")

    read_once_of_ours(path, expected)


if __name__ == "__main__":
    join_group()
    main(sys.argv[1])
    leave_group()
