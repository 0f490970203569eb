"""Gradients of parameters that every rank has whole: plain ones, and DTensors that are replicated.

Within a step modules have local tensors in the place of replicated DTensors, since each rank runs
groups of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Replicate
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import spec_of
from ..modules import slots
from ..tensor.local_parts import is_aligned
from ..tensor.wrapper import Wrapper
from .ordered_sums import OrderedSums, Summed
from .rounds import Round


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A parameter or buffer, and what stands in its places within a step."""

    name: str
    tensor: Tensor
    local: Tensor
    places: list[tuple[nn.Module, str]]


class LeafGradients:
    """The gradients of the parameters of a model that no unit has, in one step."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, ignored: Iterable[Tensor]) -> None:
        self._leaves = _leaves(model, mesh, {id(tensor) for tensor in ignored})
        self._trained = [
            one
            for one in self._leaves
            if isinstance(one.tensor, nn.Parameter) and one.tensor.requires_grad
        ]
        self._sums = OrderedSums(mesh, [_summed(one.local, mesh) for one in self._trained])
        self._before = [one.tensor.grad for one in self._trained]
        self._now: Round | None = None

    def begin(self) -> None:
        """Put local tensors in the places of DTensors, and lay gradients that there are aside."""
        for one in self._trained:
            one.tensor.grad = None
        for one in self._leaves:
            _put(one.local, one)

    def begin_round(self, now: Round) -> None:
        """Take the gradients of another group."""
        self._now = now

    def end_round(self) -> None:
        """Add the gradients of a group."""
        if self._now is not None and self._trained:
            grads = [one.local.grad for one in self._trained]
            flat = [grad if grad is None or grad.is_sparse else grad.reshape(-1) for grad in grads]
            self._sums.add(flat, self._now)
        self._now = None
        for one in self._trained:
            one.local.grad = None

    def deliver(self, num_groups: int) -> None:
        """Let the parameters have the mean over the groups, added to what gradients they had."""
        totals = self._sums.totals([num_groups] * len(self._trained))
        for number, (one, total) in enumerate(zip(self._trained, totals, strict=True)):
            if total is None:
                continue
            grad = total.view(one.local.shape)
            if isinstance(one.tensor, Wrapper):
                grad = DTensor(grad, one.tensor.spec)
            before = self._before[number]
            self._before[number] = grad if before is None else before + grad
        self.end()

    def end(self) -> None:
        """Put all back, each parameter with its gradient."""
        for one in self._leaves:
            _put(one.tensor, one)
        for one, grad in zip(self._trained, self._before, strict=True):
            one.local.grad = None
            one.tensor.grad = grad
        self._leaves, self._trained, self._before = [], [], []


def _leaves(model: nn.Module, mesh: DeviceMesh, ignored: set[int]) -> list[_Leaf]:
    names = {id(part): name for name, part in model.named_modules()}
    found: dict[int, _Leaf] = {}
    for part, own, tensor in slots(model):
        is_parameter = isinstance(tensor, nn.Parameter)
        if id(tensor) in ignored or not (is_parameter or isinstance(tensor, Wrapper)):
            continue
        if id(tensor) not in found:
            name = f"{names[id(part)]}.{own}".lstrip(".")
            found[id(tensor)] = _Leaf(name, tensor, _local(name, tensor, mesh), [])
        found[id(tensor)].places.append((part, own))
    return list(found.values())


def _local(name: str, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(tensor, Wrapper):
        local = tensor
    else:
        spec = tensor.spec
        if not spec.mesh.same_ranks_as(mesh) or any(
            placement != Replicate() for placement in spec.placements
        ):
            raise PlacementError(
                f"ElasticSteps: {name!r} lies as {spec} on {spec.mesh.layout_mesh}, but products "
                "of matrices that are split over ranks round otherwise on other meshes: use "
                f"fully_shard, or replicate it on the mesh {mesh.layout_mesh}"
            )
        plain = tensor.local.detach()
        is_parameter = isinstance(tensor, nn.Parameter)
        local = nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain
    if not is_aligned(local):
        raise PlacementError(
            f"ElasticSteps: the memory of {name!r} begins at an address that is no multiple of 64 "
            "bytes, as a part of a larger tensor does, and products of matrices may round by that: "
            "give the parameter memory of its own, as clone() does"
        )
    return local


def _summed(local: Tensor, mesh: DeviceMesh) -> Summed:
    """Return what is summed: all elements in one dim, so that ranks have equal shares of them."""
    repeated = (Replicate(),) * mesh.ndim
    goal = spec_of(mesh, repeated, (local.numel(),), None, local.dtype)
    return Summed(goal=goal, term_dtype=local.dtype, sum_dtype=local.dtype)


def _put(tensor: Tensor, one: _Leaf) -> None:
    for part, name in one.places:
        setattr(part, name, tensor)
