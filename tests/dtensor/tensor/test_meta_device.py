"""DTensors without values: a model is planned on the meta device, with groups and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_many,
)
from dtckpt.errors import PlacementError

from ..rank_meshes import collectives, run_on_mesh

PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max")]


def _planned(mesh: DeviceMesh) -> None:
    def made(placement: Placement, dtype: torch.dtype = torch.float32) -> Any:
        nothing = torch.empty(5, 6, device="meta", dtype=dtype)
        return distribute_tensor(nothing, mesh, [placement], src_data_rank=None)

    def check(tensor: Any, placement: Placement) -> None:
        assert tensor.is_meta
        assert tensor.placements == (placement,)
        assert tuple(tensor.to_local().shape) == tensor._spec.local_shape

    with collectives() as seen:
        for source in PLACEMENTS:
            for target in PLACEMENTS:
                given = made(source)
                check(given.redistribute(placements=[target]), target)
                check(given.redistribute(placements=[target], async_op=True), target)
                for moved in redistribute_many([given, given], placements=[target]):
                    check(moved, target)
            assert made(source).full_tensor().shape == (5, 6)
        weight = made(Shard(0)).requires_grad_()
        value = (F.softmax(weight @ weight.t(), 0) @ weight).norm() + torch.linalg.inv(
            (weight.t() @ weight)[None]
        ).sum()
        value.backward()
        check(weight.grad, Shard(0))
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        torch.optim.AdamW([weight]).step()
        for _ in range(2):  # the second time in the quick way
            assert (weight.detach() @ weight.detach().t()).shape == (5, 5)
        whole_numbers = DTensor.from_local(
            torch.empty(4, dtype=torch.int64, device="meta"), mesh, [Partial("avg")], shape=(4,)
        )
        with pytest.raises(PlacementError, match="floating point"):
            whole_numbers.redistribute()
    assert seen == []


def test_a_model_is_planned_on_a_mesh_with_groups() -> None:
    run_on_mesh((2,), _planned)


def test_a_model_is_planned_by_one_process_alone() -> None:
    for rank in range(2):
        _planned(DeviceMesh("cpu", Mesh((2,)), rank=rank))


def test_what_was_planned_runs_with_values() -> None:
    def body(mesh: DeviceMesh) -> None:
        for device in ("meta", "cpu", "meta", "cpu"):
            ones = torch.ones(4, 4, device=device)
            rows, columns = (
                distribute_tensor(ones, mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1)
            )
            both: Any = rows + columns
            total = both.full_tensor()
            assert total.device.type == device
            assert total.is_meta or torch.equal(total, torch.full((4, 4), 2.0))

    run_on_mesh((2,), body)


def test_kernels_of_a_device_that_is_not_here_are_not_asked() -> None:
    mesh = DeviceMesh("cuda", range(8), rank=0)
    part = torch.empty(3, 2, device="meta").t()
    given = DTensor.from_local(part, mesh, [Shard(0)], shape=(16, 3), stride=(1, 16))
    assert given.masked_fill(given > 0, 1).stride() == (1, 16)
    assert F.mse_loss(given, given, reduction="none").stride() == (1, 16)
    assert F.layer_norm(given, (3,)).shape == (16, 3)
