"""DTensors that Megatron-FSDP makes, which are cut at any row and in an order of its own.

Called by torch_ranks, in one process per rank.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import dtckpt.checkpoint as dcp
from dtckpt.errors import Unsavable

from .expected import WHOLE

with warnings.catch_warnings(action="ignore"):  # there is no Transformer Engine
    buffers: Any = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    uneven: Any = importlib.import_module("megatron_fsdp.uneven_dtensor")
    utils: Any = importlib.import_module("megatron_fsdp.utils")

TP_DIMS = {"columns": 1, "rows": 0, "bias": 0}
CUTS = {
    "uneven": {"columns": 5, "rows": 1, "bias": 3},
    "other": {"columns": 0, "rows": 4, "bias": 5},
}
"""Of the part of a rank under tensor parallelism, how many rows the first of two has."""


def made(
    mesh: DeviceMesh, name: str, num_rows: int, *, told: bool = True, fill: bool = True
) -> Any:
    """A DTensor as the package makes it of this rank's rows."""
    index = utils.FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp")
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    of_tp = WHOLE[name].chunk(2, TP_DIMS[name])[tp]
    param: Any = torch.nn.Parameter(torch.empty_like(of_tp))
    param.tensor_model_parallel, param.partition_dim = True, TP_DIMS[name]
    param.partition_stride = 1
    rows = (of_tp[:num_rows], of_tp[num_rows:])[dp]
    local = (rows.clone() if fill else torch.zeros_like(rows)).reshape(-1)
    return buffers.make_fsdp_dtensor(local, param, index, update_uneven_dtensor_chunk_meta=told)


def halves(mesh: DeviceMesh, *, fill: bool = True) -> list[Any]:
    """A fused tensor that the package has split in two, each of which lies on some ranks only."""
    fused = made(mesh, "rows", 2, told=False, fill=fill)
    return list(uneven.split_dtensor(fused, [4, 6], update_uneven_dtensor_chunk_meta=True))


def check_megatron(folder: Path) -> None:
    """Save and load, from and to other cuts, and torch's even ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for cuts, rows in CUTS.items():
        model = {name: made(mesh, name, rows[name]) for name in WHOLE}
        state = {"model": model, "halves": halves(mesh)}
        with CommDebugMode() as sent:
            dcp.save(state, folder / f"megatron {cuts}")
        assert sent.get_total_counts() == 0, sent.get_comm_counts()
    for place in (folder / "megatron other", folder / "megatron one"):
        into = {n: made(mesh, n, CUTS["uneven"][n], fill=False) for n in WHOLE}
        dcp.load({"model": into}, place, select="model")
        for name, value in into.items():
            wanted = made(mesh, name, CUTS["uneven"][name])
            assert value.to_local().equal(wanted.to_local()), name
    split = halves(mesh, fill=False)
    dcp.load({"halves": split}, folder / "megatron other", select="halves")
    for value, wanted in zip(split, halves(mesh), strict=True):
        assert value.to_local().equal(wanted.to_local())
    even = {name: _even(mesh, torch.zeros_like(value)) for name, value in WHOLE.items()}
    dcp.load({"model": even}, folder / "megatron uneven", select="model")
    for name, value in even.items():
        assert value.to_local().equal(_even(mesh, WHOLE[name]).to_local()), name
    silent = {"model": {"rows": made(mesh, "rows", 3, told=False)}}
    advice = "'model/rows'.*preprocess_state_dict_for_uneven_dtensor"
    for call, place in ((dcp.save, "refused"), (dcp.load, "megatron uneven")):
        with pytest.raises(Unsavable, match=advice):
            call(silent, folder / place)


def _even(mesh: DeviceMesh, value: Tensor) -> DTensor:
    """A DTensor of torch on another mesh, of rows."""
    line = DeviceMesh.from_group(mesh.get_group("dp"), "cpu", mesh["dp"].mesh)
    part = value.chunk(2)[mesh.get_local_rank("dp")].clone()
    return DTensor.from_local(
        part, line, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
    )
