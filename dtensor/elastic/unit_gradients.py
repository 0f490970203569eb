"""Gradients of what ``fully_shard`` treated: each unit adds them when its backward pass is over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtckpt.errors import PlacementError

from ..fsdp.gradients import as_parameter
from ..fsdp.unit import Unit
from ..mesh.device_mesh import DeviceMesh
from .ordered_sums import OrderedSums, Summed
from .rounds import Round


class UnitGradients:
    """The gradients of one unit in one step."""

    def __init__(self, unit: Unit, mesh: DeviceMesh) -> None:
        self._unit = unit
        _check(unit)
        self._trained = [i for i, one in enumerate(unit.held) if one.parameter.requires_grad]
        held = [unit.held[i] for i in self._trained]
        summed = [
            Summed(
                goal=one.sharded.spec,
                term_dtype=unit.dtype_of(one),
                sum_dtype=unit.sum_dtype_of(one),
            )
            for one in held
        ]
        self._held = held
        self._sums = OrderedSums(mesh, summed)
        self._now: Round | None = None
        self._waiting: list[Tensor | None] = []
        self._has_come = False

    def begin(self) -> None:
        """Take the gradients of the unit from now on."""
        self._unit.take = self._take

    def begin_round(self, now: Round) -> None:
        """Take those of another group."""
        self._now, self._has_come = now, False
        self._waiting = [None] * len(self._held)

    def end_round(self) -> None:
        """Add the gradients of a group that wait for its end."""
        now, self._now = self._now, None
        if now is not None and self._held and not self._unit.gradients.reduces:
            self._sums.add(self._waiting, now)
            self._waiting = []

    def deliver(self, num_groups: int) -> None:
        """Let the parameters have the mean over the groups, added to what gradients they have."""
        divisor = self._unit.gradients.divide_factor or num_groups
        totals = self._sums.totals([divisor] * len(self._held))
        for one, total in zip(self._held, totals, strict=True):
            if total is not None:
                grad = as_parameter(total, one)
                before = one.parameter.grad
                one.parameter.grad = grad if before is None else before + grad

    def end(self) -> None:
        """Leave the gradients to the unit again."""
        self._unit.take = None

    def _take(self, grads: Sequence[Tensor | None]) -> None:
        if self._now is None:
            raise PlacementError(
                "a backward pass within a step of ElasticSteps, but outside of the loop over its "
                "parts: run forward and backward pass of each part in the loop"
            )
        mine = [grads[i] for i in self._trained]
        if not self._unit.gradients.reduces:
            # In the order in which autograd brings them, which is the same wherever the group runs.
            for i, grad in enumerate(mine):
                if grad is not None:
                    before = self._waiting[i]
                    self._waiting[i] = grad.clone() if before is None else before + grad
            return
        if self._has_come:
            raise PlacementError(
                f"the gradients of {self._held[0].about.name!r} and what is sharded with it come "
                "several times in one part of the batch, as of a module that is called twice: call "
                "set_requires_gradient_sync(False) on that module, so that they wait for the end "
                "of the part"
            )
        self._has_come = True
        if self._held:
            self._sums.add(mine, self._now)


def _check(unit: Unit) -> None:
    names = ", ".join(repr(one.about.name) for one in unit.held[:3])
    if unit.gradients.hook is not None:
        raise PlacementError(
            f"ElasticSteps: the module of {names} has a hook of set_all_reduce_hook, and no "
            "gradients are all-reduced in a step: change them after the loop over the parts"
        )
    if unit.gradients.are_pending:
        raise PlacementError(
            f"ElasticSteps: gradients of {names} wait from earlier backward passes, summed on each "
            "rank: call reduce_gradients() or zero_grad() of the model first"
        )
