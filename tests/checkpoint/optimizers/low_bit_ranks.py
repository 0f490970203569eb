"""Two ranks with FSDP2, and state of their shards in tensors that are made of others.

Run by test_low_bit, one process per rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor.fsdp import fully_shard as our_fully_shard

from ...processes import join_group, leave_group
from ..tensors.subclass_stand_ins import LowBit, State4bit, State8bit, StateFp8, same


def made(shard: Any, kind: Any) -> tuple[nn.Module, LowBit]:
    """A model of which rows are split evenly and unevenly, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.Linear(64, 31, bias=False), nn.Linear(31, 7), nn.Linear(7, 1)]
    net = nn.Sequential(*layers)
    shard(net)
    return net, LowBit(net.parameters(), kind, fewest=1000)


def step(net: nn.Module, optimizer: LowBit, number: int) -> float:
    """One step of training."""
    torch.manual_seed(number)
    optimizer.zero_grad()
    loss: Any = net(torch.randn(4, 32)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(path: str) -> None:
    """Save, load into new ones and into used ones, and go on training."""
    rank = dist.get_rank()
    for name, shard in (("torch", fully_shard), ("ours", our_fully_shard)):
        for kind in (State8bit, State4bit, StateFp8):
            net, optimizer = made(shard, kind)
            for number in range(3):
                step(net, optimizer, number)
            at = f"{path}/{name}-{kind.__name__}"
            if kind is State4bit:
                ckpt.async_save({"m": net, "o": optimizer}, at).result()
            else:
                ckpt.save({"m": net, "o": optimizer}, at)
            want = [step(net, optimizer, number) for number in range(3, 6)]
            for used in (0, 2):
                other, its = made(shard, kind)
                for number in range(used):
                    step(other, its, number + 7)
                ckpt.load({"m": other, "o": its}, at)
                got = [step(other, its, number) for number in range(3, 6)]
                assert got == want, (name, kind, used, got, want)
                pairs = zip(net.parameters(), other.parameters(), strict=True)
                for place, (mine, theirs) in enumerate(pairs):
                    one, two = optimizer.state[mine], its.state[theirs]
                    assert one["step"] == two["step"]
                    assert same(one["momentum_buffer"], two["momentum_buffer"]), (
                        rank,
                        name,
                        kind,
                        place,
                    )
            weights = list(net.parameters())
            kinds = [
                type(optimizer.state[w]["momentum_buffer"]._local_tensor) for w in weights[:3:2]
            ]
            # Rank 1 has fewer rows of the second one: too few elements for such state.
            assert kinds == [kind, kind if rank == 0 else torch.Tensor], kinds


if __name__ == "__main__":
    join_group()
    main(sys.argv[1])
    leave_group()
