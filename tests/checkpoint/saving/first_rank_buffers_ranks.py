"""Saves buffers that ranks have unlike. Run by test_first_rank_buffers: FOLDER."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.saving.first_rank_buffers import declare_buffers_of_ddp
from dtckpt.errors import LayoutMismatch

from ...processes import join_group, leave_group

NAMES = ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


def trained(rank: int, **options: Any) -> tuple[Any, Any]:
    """Return a DDP module and its optimizer after a step, each rank with its own data."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(rank)
    ddp(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return ddp, optimizer


def main(root: str) -> None:
    rank = join_group()
    ddp, optimizer = trained(rank)
    mean = ddp.module[1].running_mean
    means = [torch.zeros(4) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(means, mean)
    assert not torch.equal(means[0], means[1])
    own = mean.clone()

    # The module that is wrapped, alone: refused, with what to do.
    with pytest.raises(
        LayoutMismatch, match=r"PerRank, .* PerCoordinate\. .* buffers_of_first_rank"
    ):
        ckpt.save({"model": ddp.module}, f"{root}/refused")

    # DDP in the state.
    report = ckpt.save({"model": ddp, "opt": optimizer}, f"{root}/ddp")
    assert sorted(report.first_rank_buffers) == [f"model/{name}" for name in NAMES]
    handle = ckpt.async_save({"app": {"inner": ddp}}, f"{root}/async")
    assert len(handle.result().first_rank_buffers) == 3
    assert torch.equal(mean, own), "a save changes nothing"

    # Declared; also as a dict.
    ckpt.buffers_of_first_rank(ddp.module)
    report = ckpt.save({"model": ddp.module.state_dict()}, f"{root}/bare")
    assert sorted(report.first_rank_buffers) == [f"model/{name}" for name in NAMES]

    for path, prefix in (
        ("ddp", "model/"),
        ("async", "app/inner/"),
        ("bare", "model/"),
    ):
        with ckpt.open(f"{root}/{path}") as opened:
            assert torch.equal(opened[f"{prefix}1.running_mean"][...], means[0])
            assert opened[f"{prefix}1.num_batches_tracked"][...].item() == 1
        assert not ckpt.verify(f"{root}/{path}").problems
    fresh, _ = trained(7)
    ckpt.load({"model": fresh}, f"{root}/ddp", strict=False)
    assert torch.equal(fresh.module[1].running_mean, means[0])
    assert torch.equal(fresh.module[0].weight, ddp.module[0].weight)

    # A rank by itself saves its own.
    if rank == 1:
        report = ckpt.save({"model": ddp.module}, f"{root}/alone", no_dist=True)
        assert not report.first_rank_buffers
        with ckpt.open(f"{root}/alone") as opened:
            assert torch.equal(opened["model/1.running_mean"][...], own)

    # Ranks whose buffers DDP leaves alone.
    kept, _ = trained(rank, broadcast_buffers=False)
    declare_buffers_of_ddp(kept)
    with pytest.raises(LayoutMismatch, match="different values"):
        ckpt.save({"model": kept}, f"{root}/kept")
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
