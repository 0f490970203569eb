"""Every documented name of torch's DTensors is at its documented path, with ours before it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import pytest

import dtckpt.dtensor

NAMES = {
    "": (
        "DTensor distribute_tensor distribute_module zeros ones empty full rand randn "
        "linspace logspace"
    ),
    "DTensor": (
        "from_local to_local full_tensor redistribute device_mesh placements __create_chunk_list__"
    ),
    "placement_types": "Placement Shard Replicate Partial Ragged Packed HeadTail",
    "placement_types.Placement": "is_shard is_replicate is_partial",
    "device_mesh": "DeviceMesh init_device_mesh",
    "device_mesh.DeviceMesh": (
        "from_group get_all_groups get_coordinate get_group get_local_rank get_rank ndim mesh "
        "mesh_dim_names shape size device_type __getitem__ __enter__"
    ),
    "api": (
        "DTensor distribute_tensor distribute_module zeros ones empty full rand randn "
        "linspace logspace"
    ),
    "random": "manual_seed is_rng_supported_mesh",
    "debug": "CommDebugMode visualize_sharding",
    "debug.comm_mode": "CommDebugMode",
    "debug.CommDebugMode": (
        "get_comm_counts get_total_counts get_parameter_info get_sharding_info "
        "generate_comm_debug_tracing_table generate_json_dump log_comm_debug_tracing_table_to_file"
    ),
    "experimental": "local_map register_sharding implicit_replication",
    "experimental.func_map": "local_map PlacementType",
    "experimental.register_sharding": "register_sharding",
    "experimental.tp_transform": "plan_of placement_rules_of",
    "parallel": (
        "parallelize_module ParallelStyle ColwiseParallel RowwiseParallel SequenceParallel "
        "PrepareModuleInput PrepareModuleOutput PrepareModuleInputOutput loss_parallel"
    ),
    "parallel.loss": "loss_parallel",
    "parallel.api": "parallelize_module",
    "parallel.input_reshard": "input_reshard",
    "parallel.style": (
        "ParallelStyle ColwiseParallel RowwiseParallel SequenceParallel "
        "PrepareModuleInput PrepareModuleOutput PrepareModuleInputOutput"
    ),
    "fsdp": "fully_shard FSDPModule MixedPrecisionPolicy register_fsdp_forward_method",
}
"""What comes after ``torch.distributed.tensor``, or for ``device_mesh`` and ``fsdp`` after
``torch.distributed``: a module or class, and the names in it."""

NOT_THERE = {
    "debug.visualize_sharding": "the function has this name; a module would take it away",
    "experimental.tp_transform.tensor_parallel_transformation": (
        "the module alone is documented; here it has plan_of and placement_rules_of"
    ),
    "api.XLAShardedTensor": "there are no meshes of XLA devices",
}
"""Names of the documentation that are no module here, or not at all."""


def at(path: str) -> object:
    """Return the module at a path, or the class in the module before its last name."""
    found: object = dtckpt.dtensor
    for part in path.split(".") if path else ():
        if inspect.ismodule(found) and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found, part)
    return found


def documented() -> Iterator[tuple[str, str]]:
    for path, names in NAMES.items():
        yield from ((path, name) for name in names.split())


@pytest.mark.parametrize(("path", "name"), [*documented()])
def test_documented_names_are_where_they_are_documented(path: str, name: str) -> None:
    place = at(path)
    if inspect.isclass(place):
        assert hasattr(place, name)
        return
    full = ".".join(filter(None, ["dtckpt.dtensor", path]))
    namespace: dict[str, object] = {}
    exec(f"from {full} import {name}", namespace)
    assert not inspect.ismodule(namespace[name]), "a module must not hide what it is named for"
    assert name in getattr(place, "__all__", [name])


@pytest.mark.parametrize("path", NOT_THERE)
def test_what_is_not_there_is_no_module(path: str) -> None:
    with pytest.raises(ImportError):
        importlib.import_module(f"dtckpt.dtensor.{path}")


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    module = importlib.import_module("dtckpt.dtensor.experimental.register_sharding")
    assert inspect.ismodule(module)
    experimental = importlib.import_module("dtckpt.dtensor.experimental")
    assert experimental.register_sharding is dtckpt.dtensor.register_sharding
    assert callable(experimental.register_sharding)
