"""Whether an optimizer treats every element alike, wherever it lies: found out by trying.

Vector code takes as many elements at once as fit and leaves the rest to other code, which may round
otherwise: torch's fused optimizers on CPUs do (a fused multiply-add here, two roundings there), and
some on parameters of 16 bits. Which elements are the rest depends on the shard.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtckpt.errors import PlacementError

from ..comm.caches import Cache, remembered
from ..dtensor import DTensor
from ..geometry.mesh import Mesh
from ..geometry.placement import Replicate
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import spec_of
from ..tensor.wrapper import Wrapper

PART = 15
"""Elements of a part: fewer than a vector has."""
NUM_ELEMENTS = 400 * PART
NUM_STEPS = 3

_DIFFERENT: Cache[str, int] = Cache("tried_optimizers", 1 << 8)
"""How many elements were different, by what was tried."""


def require_alike(optimizer: Optimizer) -> None:
    """Raise PlacementError where an optimizer gives parts of a tensor other bits than the whole.

    Nothing of the optimizer changes.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        kinds = {
            (p.dtype, p.device, isinstance(p, Wrapper))
            for p in group["params"]
            if p.requires_grad and not p.is_meta
        }
        for dtype, device, is_ours in kinds:
            tried = f"{type(optimizer)} {sorted(_others(group).items())} {dtype} {device} {is_ours}"
            count = _DIFFERENT.get(tried)
            if count is None:
                count = _num_different(optimizer, group, dtype, device, is_ours)
                _DIFFERENT.put(tried, count)
            if count:
                raise PlacementError(
                    f"ElasticSteps: {name} on {dtype} gives {count} of {NUM_ELEMENTS} "
                    "elements other bits where they lie in other shards; use foreach=True or "
                    "fused=False, and parameters in float32"
                )


def _num_different(
    optimizer: Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    is_ours: bool,
) -> int:
    """Return how many elements depend on whether they lie in one tensor or in many small ones."""
    generator = torch.Generator("cpu").manual_seed(0)
    start, *gradients = (
        torch.randn(NUM_ELEMENTS, generator=generator, device="cpu").to(device, dtype)
        for _ in range(NUM_STEPS + 1)
    )
    sizes = 10.0 ** torch.randint(-6, 2, (NUM_ELEMENTS,), generator=generator, device="cpu")
    gradients = [gradient * sizes.to(device, dtype) for gradient in gradients]
    try:
        whole, parts = (
            _stepped(optimizer, group, start, gradients, part, is_ours)
            for part in (NUM_ELEMENTS, PART)
        )
    except Exception as error:
        raise PlacementError(
            f"ElasticSteps: {type(optimizer).__name__} could not be tried, which tells whether its "
            f"results depend on shards: {error!r}. Pass optimizers whose step takes no arguments"
        ) from error
    return int((whole != parts).sum().item())


def _stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    start: Tensor,
    gradients: list[Tensor],
    part: int,
    is_ours: bool,
) -> Tensor:
    """Return the elements after some steps of a like optimizer, in tensors of ``part`` each."""
    parameters = [nn.Parameter(_made(one, is_ours)) for one in start.split(part)]
    alike = copy.copy(optimizer)  # without its hooks
    alike.param_groups = [{**copy.deepcopy(_others(group)), "params": parameters}]
    alike.state = defaultdict(dict)
    for gradient in gradients:
        for parameter, one in zip(parameters, gradient.split(part), strict=True):
            parameter.grad = _made(one, is_ours)
        alike.step()
    return torch.cat([p.local if isinstance(p, Wrapper) else p.detach() for p in parameters])


def _others(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _made(part: Tensor, is_ours: bool) -> Tensor:
    local = part.clone()
    if not is_ours:
        return local
    mesh = _alone(local.device.type)
    return DTensor(local, spec_of(mesh, (Replicate(),), local.shape, None, local.dtype))


@remembered(8)
def _alone(device_type: str) -> DeviceMesh:
    return DeviceMesh(device_type, Mesh((1,)), rank=0)
