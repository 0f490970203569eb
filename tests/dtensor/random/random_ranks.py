"""Activation checkpointing with dropout, one process per rank. Run by test_random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DTensor, distribute_module, init_device_mesh, randn, random

from ...processes import join_group, leave_group


def main() -> None:
    """Compare gradients with and without checkpoints; the ranks' own generators differ."""
    join_group()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(mesh.get_rank())
    with mesh:
        assert random.get_rng_state() == {"seed": 0, "offset": 0}
        nets = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        distribute_module(nets)

        def block(net: nn.Module, x: Tensor) -> Tensor:
            return F.dropout(net(F.dropout(x, 0.3)).relu(), 0.3)

        def gradients(checkpoints: bool) -> list[Tensor]:
            random.manual_seed(1)
            nets.zero_grad()
            for _ in range(2):  # the second forward pass before the backward pass of the first
                x: Tensor = randn(6, 8)
                for net in nets:
                    made = checkpoint(block, net, x, use_reentrant=False) if checkpoints else None
                    x = block(net, x) if made is None else made
                x.square().sum().backward()
            found = [p.grad for p in nets.parameters()]
            return [g.full_tensor() for g in found if isinstance(g, DTensor)]

        for a, b in zip(gradients(True), gradients(False), strict=True):
            assert a.abs().sum().item() > 0
            torch.testing.assert_close(a, b)
    leave_group()


if __name__ == "__main__":
    main()
