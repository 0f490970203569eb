"""Two ranks with experts as torch's DTensors, of which one has no gradient or other steps.

Run by test_own_entries, one process per rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dtckpt.checkpoint as ckpt

from ...processes import join_group, leave_group


class Moe(nn.Module):
    """A gate that all ranks share, and experts that are spread over them."""

    def __init__(self, mesh: Any, value: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))
        rows = torch.full((2, 4), value)
        self.experts = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))


def local(value: Any) -> Any:
    """The values of this rank."""
    return value.to_local() if isinstance(value, DTensor) else value


def trained(mesh: Any, rank: int, steps: int) -> tuple[Moe, torch.optim.AdamW]:
    """Experts and their optimizer, after so many steps of this rank's, and two of the gate."""
    moe = Moe(mesh, float(rank))
    optimizer = torch.optim.AdamW(moe.parameters(), foreach=False)
    for number in range(2):
        moe.gate.grad = torch.ones(4)
        moe.experts.grad = torch.ones_like(moe.experts) if number < steps else None
        optimizer.step()
    return moe, optimizer


def main(path: str) -> None:
    """Save, load into new ones and into used ones, and go on training."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for steps in ((2, 0), (0, 1), (1, 2)):
        moe, optimizer = trained(mesh, rank, steps[rank])
        at = f"{path}/{steps[0]}-{steps[1]}"
        ckpt.async_save({"model": moe, "opt": optimizer}, at).result()
        for used in (0, 2):
            other, its = trained(mesh, 5, used)
            if not used:
                its = torch.optim.AdamW(other.parameters(), foreach=False)
            ckpt.load({"model": other, "opt": its}, at)
            pairs = zip(moe.parameters(), other.parameters(), strict=True)
            for number, (mine, theirs) in enumerate(pairs):
                assert torch.equal(local(mine), local(theirs)), (steps, number)
                want, got = optimizer.state.get(mine, {}), its.state.get(theirs, {})
                assert want.keys() == got.keys(), (steps, number, got.keys())
                for key, value in want.items():
                    assert type(got[key]) is type(value), key
                    assert got[key].dtype == value.dtype, key
                    assert torch.equal(local(got[key]), local(value)), (steps, number, key)
            for one, opt in ((moe, optimizer), (other, its)) if used else ():
                one.gate.grad = torch.ones(4)
                one.experts.grad = torch.ones_like(one.experts)
                opt.step()
            assert torch.equal(local(moe.experts), local(other.experts)), steps


if __name__ == "__main__":
    join_group()
    main(sys.argv[1])
    leave_group()
