"""One training, in any cell of the matrix: two optimizers, schedules, a scaler, averages, noise."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DTensor

from .matrix_layouts import Cell, data_axes, data_place, spread
from .matrix_model import ROWS, Loader

FAST = ("block.", "mixture.")
"""Parameters of the first optimizer."""


class Training:
    """A rank's part of a training."""

    def __init__(self, cell: Cell, mesh: Any, group: Any, seed: int) -> None:
        self.cell, self.mesh, self.group = cell, mesh, group
        self.model: Any = spread(cell, mesh, group, seed)
        self.index, self.count = data_place(cell, mesh)
        self.loader = Loader(self.index, self.count)
        self.noise = torch.Generator().manual_seed(seed)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.averages = {
            name.removeprefix("module."): parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.state: dict[str, Any] = {
            "model": self.model,
            "averages": self.averages,
            "scaler": self.scaler,
            "noise": ckpt.RandomNumbers(axes=(), process=False, generators={"noise": self.noise}),
            "loader": ckpt.PerCoordinate(
                self.loader, mesh, data_axes(cell), resize=ckpt.deal_samples("taken")
            ),
            "step": 0,
            "counters": ckpt.Counters(
                step=lambda: self.state["step"],
                batches=lambda: self.loader.taken * self.count // ROWS,
            ),
        }
        self.optimizers: list[torch.optim.Optimizer] = []
        self.add_optimizers()

    def add_optimizers(self) -> None:
        """Make those for which this rank has parameters."""
        fast: list[Tensor] = []
        slow: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                is_fast = name.removeprefix("module.").startswith(FAST)
                (fast if is_fast else slow).append(parameter)
        if fast:
            adam = torch.optim.AdamW(fast, lr=0.02, weight_decay=0.1)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
            self.state |= {"adam": adam, "cosine": cosine}
            self.optimizers.append(adam)
        if slow:
            sgd = torch.optim.SGD(slow, lr=0.1, momentum=0.9)
            steps = torch.optim.lr_scheduler.StepLR(sgd, 2, gamma=0.5)
            self.state |= {"sgd": sgd, "steps": steps}
            self.optimizers.append(sgd)

    def train(self, steps: int) -> list[float]:
        """Return the losses of whole batches, and what the averages are like in the end."""
        losses = [self.step() for _ in range(steps)]
        squares = [_whole((value.double() ** 2).sum()) for value in self.averages.values()]
        total = torch.stack(squares).sum()
        if self.cell.kind == "PP":
            dist.all_reduce(total, group=self.group)
            total /= self.count
        return [*losses, float(total), self.scaler.get_scale()]

    def step(self) -> float:
        rows = self.loader.next()
        noise = torch.randn(ROWS, 6, generator=self.noise, dtype=torch.float64)
        x = rows + 0.1 * noise[self.index :: self.count]
        loss = self.run_stage(x, rows) if self.cell.kind == "PP" else self.run(x, rows)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(self.scaler.get_scale())
            optimizer.step()
            optimizer.zero_grad()
        for name in ("cosine", "steps"):
            if name in self.state:
                self.state[name].step()
        self.scaler.update(self.scaler.get_scale() * 2)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.averages[name.removeprefix("module.")].mul_(0.5).add_(parameter, alpha=0.5)
        self.state["step"] += 1
        told = torch.zeros(2, dtype=torch.float64)
        if loss is not None:
            told[0], told[1] = loss, 1
        dist.all_reduce(told, group=self.group)
        return float(told[0] / told[1])

    def run(self, x: Tensor, rows: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), rows[:, :4])
        self.scaler.scale(loss).backward()
        return loss.detach()

    def run_stage(self, x: Tensor, rows: Tensor) -> Tensor | None:
        """Run this stage of a pipeline, forward and back."""
        mesh, group = self.mesh, self.mesh.get_group("pp")
        stage, last = mesh.get_local_rank("pp"), self.cell.sizes[0] - 1
        loss: Tensor | None = None
        self.scaler.scale(torch.ones(()))  # which makes its tensor on every stage
        if stage > 0:
            x = torch.empty(len(x), 8, dtype=torch.float64)
            dist.recv(x, group=group, group_src=stage - 1)
            x.requires_grad_()
        made = self.model(x)
        if stage == last:
            loss = F.mse_loss(made, rows[:, :4])
            self.scaler.scale(loss).backward()
        else:
            dist.send(made.detach(), group=group, group_dst=stage + 1)
            grad = torch.empty_like(made)
            dist.recv(grad, group=group, group_src=stage + 1)
            made.backward(grad)
        if stage > 0 and x.grad is not None:
            dist.send(x.grad, group=group, group_dst=stage - 1)
        if self.count > 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
                    parameter.grad /= self.count
        return None if loss is None else loss.detach()


def _whole(value: Any) -> Tensor:
    if isinstance(value, DTensor) or hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach()
