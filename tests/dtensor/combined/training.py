"""The same training on one device and on several ranks, and all that it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, random
from dtckpt.dtensor.fsdp import FSDPModule, MixedPrecisionPolicy

from .gpt import CONFIG, ROWS, Gpt, Kind, make_gpt
from .spreading import Spread

ALONE = Spread(mesh="one=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained."""

    name: str
    kind: Kind = field(default_factory=Kind)
    steps: int = 2
    repeats: bool = False
    """Whether all ranks have the whole batch; else they share its rows, unequally."""
    is_adam: bool = True
    foreach: bool = True
    max_norm: float | None = None
    accumulates: int = 1
    """Backward passes before a step; only the last one reduces gradients."""
    scales: bool = False
    """Whether a ``GradScaler`` is used; one gradient of the second step is infinite then."""
    computes_in: torch.dtype | None = None
    """Whether parameters are cast for the passes."""
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Told:
    """What a training told: the same on every rank, but for the losses."""

    losses: list[float] = field(default_factory=list[float])
    """Of this rank's part of the batch, so that the mean over the ranks is that of the batch."""
    tested: list[float] = field(default_factory=list[float])
    """The same after each step, without dropout and gradients."""
    numbers: list[float] = field(default_factory=list[float])
    """Norms of gradients, learning rates, scales."""
    tensors: dict[str, Tensor | None] = field(default_factory=dict[str, Tensor | None])
    """Gradients of every step, and what parameters and buffers are in the end."""


def train_alone(recipe: Recipe) -> Told:
    """Train on one device, where nothing has to be made anew."""
    recipe = replace(recipe, kind=replace(recipe.kind, remakes=None))
    return train(recipe, ALONE, DeviceMesh("cpu", Mesh.parse(ALONE.mesh), rank=0))


def train(recipe: Recipe, spread: Spread, mesh: DeviceMesh) -> Told:
    """Train on the ranks of a mesh."""
    model = make_gpt(recipe.kind, recipe.dtype)
    reduce_in = None if recipe.computes_in is None else recipe.dtype
    precision = MixedPrecisionPolicy(param_dtype=recipe.computes_in, reduce_dtype=reduce_in)
    spread.apply(model, mesh, precision, repeats=recipe.repeats)
    random.manual_seed(5, mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(recipe, trained)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * recipe.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=recipe.scales)
    told = Told()

    for step in range(recipe.steps):
        for turn in range(recipe.accumulates):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(turn == recipe.accumulates - 1)
            batch = _batch(recipe, spread, mesh, step * recipe.accumulates + turn)
            with spread.sharing(mesh, *batch):
                loss = _loss(model, recipe, spread, batch)
                scaler.scale(loss / recipe.accumulates).backward()
            told.losses.append(loss.item())
        if recipe.scales and step == 1:
            _spoil(model, mesh, spread)
        scaler.unscale_(optimizer)
        if recipe.max_norm is not None:
            norm: Any = torch.nn.utils.clip_grad_norm_(trained, recipe.max_norm)
            told.numbers.append(norm.item())
        for name, parameter in model.named_parameters():
            told.tensors[f"gradient {step} of {name}"] = _whole(parameter.grad)
        scaler.step(optimizer)
        scaler.update()
        told.numbers += [scaler.get_scale(), float(schedule.get_last_lr()[0])]
        schedule.step()
        optimizer.zero_grad()
        model.eval()
        batch = _batch(recipe, spread, mesh, 100)
        with torch.no_grad(), spread.sharing(mesh, *batch):
            told.tested.append(_loss(model, recipe, spread, batch).item())
        model.train()
    told.tensors |= {name: _whole(value) for name, value in model.state_dict().items()}
    return told


def _optimizer(recipe: Recipe, parameters: list[Any]) -> torch.optim.Optimizer:
    if recipe.is_adam:
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, foreach=recipe.foreach)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=recipe.foreach)


def _batch(recipe: Recipe, spread: Spread, mesh: DeviceMesh, number: int) -> tuple[Tensor, ...]:
    """Return inputs, targets and places of this rank's rows."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CONFIG.vocabulary, (ROWS, CONFIG.context + 1), generator=generator)
    if not recipe.repeats:
        tokens = spread.part(tokens, mesh)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(CONFIG.context)


def _loss(model: Gpt, recipe: Recipe, spread: Spread, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, targets, places = batch
    if recipe.computes_in is None or spread is not ALONE:
        logits = model(inputs, places)
    else:
        cast = {name: p.to(recipe.computes_in) for name, p in model.named_parameters()}
        logits = torch.func.functional_call(model, cast, (inputs, places))
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    parts = 1 if recipe.repeats else spread.num_parts
    return total * (parts / (ROWS * CONFIG.context))


def _spoil(model: Gpt, mesh: DeviceMesh, spread: Spread) -> None:
    """Make one element of one gradient infinite, which only some ranks have."""
    grad: Any = model.head.weight.grad
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if all(mesh.get_local_rank(name) == 0 for name in spread.axes if name != "rep"):
        local.view(-1)[0] = torch.inf


def _whole(value: Tensor | None) -> Tensor | None:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return None if value is None else value.detach().clone()
