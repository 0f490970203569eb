"""Errors that programs for torch's DTensors expect: the kinds that they catch, and the phrases.

Programs search messages for these words, so they stand in ours, beside what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.parallel import PrepareModuleInput, parallelize_module
from tests.ranks import gloo_group

from .rank_meshes import run_on_mesh

_c10d: Any = dist

MATRIX = torch.ones(2, 2)


def mesh_of(*names: str, ndim: int = 1) -> DeviceMesh:
    return DeviceMesh("cpu", Mesh((1,) * (len(names) or ndim), names), rank=0)


def from_group(ranks: Any, *, listed: int = 0) -> DeviceMesh:
    group = gloo_group(_c10d.HashStore(), 0, 1)
    return DeviceMesh.from_group([group] * listed if listed else group, "cpu", ranks)


def overridden(**overrides: str) -> DeviceMesh:
    given: Any = {int(key[1:]) if key[0] == "_" else key: b for key, b in overrides.items()}
    return DeviceMesh("cpu", Mesh((2, 2), ("dp", "tp")), rank=0, backend_override=given)


def sharded(*dims: int) -> nn.Module:
    def choose(_: nn.Parameter) -> Placement:
        return Shard(dims[0])

    return fully_shard(nn.Linear(2, 2), mesh=mesh_of("dp"), shard_placement_fn=choose)


def sharded_twice() -> None:
    net = fully_shard(nn.Linear(2, 2), mesh=mesh_of("dp"))
    fully_shard(net, mesh=mesh_of("dp"))


def run_without_values() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(net[0], mesh=mesh_of("dp"))
    fully_shard(net, mesh=mesh_of("dp"))(torch.ones(2))


def given_to(*inputs: torch.Tensor) -> None:
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(nn.Bilinear(2, 2, 2), mesh_of("tp"), style)(*inputs)


def set_hook_with_stream() -> None:
    net: Any = fully_shard(nn.Linear(2, 2), mesh=mesh_of("dp", "fsdp"))
    net.set_all_reduce_hook(print, stream=object())


def added_across_meshes() -> None:
    left, right = (distribute_tensor(MATRIX, mesh_of(ndim=ndim)) for ndim in (1, 2))
    torch.ops.aten._foreach_add.List([left], [right])


CASES: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "names alike": (
        RuntimeError,
        "Each mesh_dim_name must be unique.",
        lambda: mesh_of("dp", "dp"),
    ),
    "too many names": (
        RuntimeError,
        "mesh_shape and mesh_dim_names should have same length!",
        lambda: Mesh((8,), ("dp", "tp")),
    ),
    "one device": (
        RuntimeError,
        "Device type with index is not supported",
        lambda: init_device_mesh("cuda:0", (2, 2)),
    ),
    "rank along which": (
        RuntimeError,
        "Optional kwarg `mesh_dim` needs to be specified when device_mesh.ndim > 1",
        lambda: mesh_of("dp", "tp").get_local_rank(),
    ),
    "no names": (
        KeyError,
        "Cannot slice a DeviceMesh without mesh_dim_names!",
        lambda: mesh_of(ndim=2)["DP"],
    ),
    "one group for two dims": (
        ValueError,
        "Invalid mesh [[0], [1]] for ProcessGroup with ranks ",
        lambda: from_group([[0], [1]]),
    ),
    "two groups for one dim": (
        ValueError,
        "Expects mesh with ndim equal to number of ProcessGroups but got mesh [0] and 2 Process",
        lambda: from_group([0], listed=2),
    ),
    "override twice": (
        RuntimeError,
        "Found redundant dim index 0 and name dp in backend_override",
        lambda: overridden(dp="gloo", _0="gloo"),
    ),
    "override of no name": (
        KeyError,
        "Found invalid keys in backend_override: got ['cp']",
        lambda: overridden(cp="gloo"),
    ),
    "override of no index": (
        KeyError,
        "Found invalid keys in backend_override: got [42]",
        lambda: overridden(_42="gloo"),
    ),
    "too few placements": (
        ValueError,
        "must have the same length",
        lambda: distribute_tensor(MATRIX, mesh_of("a", "b"), [Shard(0)]),
    ),
    "no leaf": (
        RuntimeError,
        "distribute leaf tensor",
        lambda: distribute_tensor(MATRIX.clone().requires_grad_() + 2, mesh_of("a")),
    ),
    "other placements": (
        ValueError,
        "to a different placements",
        lambda: distribute_tensor(
            distribute_tensor(MATRIX, mesh_of("a")), mesh_of("a"), [Shard(0)]
        ),
    ),
    "other mesh": (
        ValueError,
        "to a different device mesh",
        lambda: distribute_tensor(distribute_tensor(MATRIX, mesh_of("a")), mesh_of("a", "b")),
    ),
    "operator across meshes": (RuntimeError, "Sharding propagation failed", added_across_meshes),
    "layouts unlike": (
        AssertionError,
        "input_layouts and desired_input_layouts should have same length!",
        lambda: PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(Shard(0), None)),
    ),
    "inputs unlike": (
        ValueError,
        "module inputs and input_layouts should have same length!",
        lambda: given_to(MATRIX, MATRIX),
    ),
    "three dims": (
        ValueError,
        "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
        lambda: fully_shard(nn.Linear(2, 2), mesh=mesh_of(ndim=3)),
    ),
    "no such dim": (AssertionError, "Shard dim 1 is invalid for 1D tensor", lambda: sharded(1)),
    "sharded twice": (AssertionError, "can only be applied to a module once.", sharded_twice),
    "no forward": (
        ValueError,
        "fully_shard does not support containers that do not implement forward",
        lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
    ),
    "no values": (
        RuntimeError,
        "FSDP parameters should be materialized from meta device before training, but the "
        "following were still on meta device: ['1.weight', '1.bias']",
        run_without_values,
    ),
    "hook with a stream": (
        ValueError,
        "stream cannot be set when using native HSDP",
        set_hook_with_stream,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_have_the_kind_and_the_phrase_of_torch(name: str) -> None:
    kind, phrase, call = CASES[name]
    with pytest.raises(kind) as failure:
        call()
    assert phrase in str(failure.value)


def test_parameters_may_get_their_values_after_they_were_sharded() -> None:
    mesh = mesh_of("dp")
    with torch.device("meta"):
        net = fully_shard(nn.Linear(2, 2), mesh=mesh)
    full = {"weight": MATRIX, "bias": torch.ones(2)}
    given = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in full.items()}
    net.load_state_dict(given, assign=True)
    assert net(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]


def test_hooks_of_gradients_run_on_a_stream_of_cpus() -> None:
    def body(mesh: DeviceMesh) -> None:
        net: Any = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh)
        stream = torch.cpu.Stream()
        seen: list[object] = []

        def note(_: torch.Tensor) -> None:
            seen.append(torch.cpu.current_stream())

        net.set_all_reduce_hook(note, stream=stream)
        net(torch.ones(1, 2)).sum().backward()
        assert seen == [stream]
        assert isinstance(net.weight.grad, DTensor)

    run_on_mesh((2,), body)
