"""``ElasticSteps``: training steps that give the same bits on every mesh."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtckpt.errors import PlacementError

from ..fsdp.state import states_below
from ..mesh.modes import mesh_independent
from ..mesh.resolving import AnyMesh
from ..mesh.rows import gather_floats, gather_rows
from ..mesh.same_mesh import code_of
from ..tensor.wrapper import Wrapper
from .batches import describe, group_of, num_groups
from .contract import mesh_of, refuse_running_statistics
from .environment import Environment, differences, environment, require_deterministic
from .exact_norms import norm
from .leaf_gradients import LeafGradients
from .parts import Gradients, Parts
from .rounds import Rounds
from .trial import require_alike
from .unit_gradients import UnitGradients


class StepsState(TypedDict):
    """What a checkpoint has of ``ElasticSteps``."""

    seed: int
    group: int
    count: int
    environment: dict[str, str]


class ElasticSteps:
    """Training steps whose losses, gradients and weights have the same bits on every mesh of data.

    A batch is cut into groups of ``group`` elements, and each group runs by itself: forward and
    backward pass, with random numbers that are a function of ``seed``, step and group. The
    gradients are added in the order of the groups, which is what one rank does that runs one after
    the other. So 20 steps on 4 ranks are 10 on 4, 5 on 2 and 5 on 3, to the last bit::

        steps = ElasticSteps(model, optimizer, seed=0)
        for batch in batches:  # whole batches, the same on every rank, or DTensors
            with steps.step(batch) as parts:
                for part in parts:
                    steps.backward(loss_of(model(part)))
                steps.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            print(steps.mean_loss())

    The loss of a part is the mean over its elements; gradients and ``mean_loss`` are means over
    the groups. ``fully_shard`` has treated ``model``, or every rank has all of it: plain parameters
    of equal values, which the first step compares, or DTensors that are replicated, on ``mesh``.

    Every rank has to make it, and take each step, alike. Raises PlacementError for what would
    depend on the mesh: parameters that are split by tensor parallelism, batch norms that train,
    optimizers that round elements by where they lie, kernels that are not deterministic, ranks of
    different processors or numbers of threads, reductions of floats by other means.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        seed: int,
        group: int = 1,
        mesh: AnyMesh | None = None,
        any_environment: bool = False,
    ) -> None:
        units = [state.unit for state in states_below(model)]
        self._mesh = mesh_of(units, mesh)
        if group < 1:
            raise PlacementError(f"ElasticSteps: a group has 1 or more elements, not {group}")
        for one in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
            require_alike(one)
        self._model, self._units = model, units
        self._seed, self._group = seed, group
        self._any_environment = any_environment
        self._is_compared = False
        """Whether plain parameters were, before the first step."""
        self._losses: list[Tensor] = []
        self._parts: Parts | None = None
        """Those of this step, or of the last one."""
        self.count = 0
        """Steps that have been taken, those before a resume, too."""

    @contextmanager
    def step(self, *batch: Tensor) -> Generator[Parts]:
        """Take one step: yields the parts of the batch that this rank runs, one after the other.

        ``batch`` are tensors whose dim 0 counts the elements of the whole batch: plain ones with
        equal values on all ranks, which is checked, or DTensors on the mesh, laid out in any way.
        A rank may run a part again that does not count, so that all ranks gather parameters
        together. Once the loop over the parts has ended the parameters have their gradients.
        """
        groups = self._agree(batch)
        rounds = Rounds(self._mesh.layout_mesh, groups)
        given = [group_of(tensor, self._group, rounds, self._mesh) for tensor in batch]
        parts = Parts(self._model, self._mesh, rounds, given, self._gradients(), self._seed_of)
        self._losses, self._parts = [], parts
        with mesh_independent():
            try:
                parts.begin()
                yield parts
            finally:
                parts.end()
        if not parts.is_over:
            raise PlacementError(
                "ElasticSteps.step: the loop over the parts was not brought to its end, so "
                "gradients are missing"
            )
        self.count += 1

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss of a part, and note it for ``mean_loss``."""
        if loss.numel() != 1 or isinstance(loss, Wrapper):
            raise PlacementError(
                "ElasticSteps.backward: the loss of a part is one number on this rank, got "
                f"{loss.spec if isinstance(loss, Wrapper) else list(loss.shape)}"
            )
        loss.backward()
        self.note(loss)

    def note(self, loss: Tensor) -> None:
        """Note the loss of a part, where it is not what ``backward`` is called on: a scaled one."""
        now = None if self._parts is None else self._parts.now
        if now is None:
            raise PlacementError("ElasticSteps: losses are those of parts, within the loop")
        if now.own is not None:
            self._losses.append(loss.detach().reshape(()))

    def mean_loss(self) -> float:
        """Return the mean of the losses of all groups of the last step, exact but for one rounding.

        Every rank has to call. PlacementError unless each group has one loss.
        """
        wanted, most = 0, 0
        if self._parts is not None:
            wanted, most = self._parts.rounds.num_groups, len(self._parts)
        own = torch.stack(self._losses).double().tolist() if self._losses else []
        row = [len(own), *own[:most], *[0.0] * (most - len(own))]
        rows = gather_floats(row, self._mesh).values()
        count = sum(int(length) for length, *_ in rows)
        if count != wanted or not count:
            raise PlacementError(
                f"ElasticSteps.mean_loss: {count} losses were noted for {wanted} groups; "
                "call backward, or note, once for each part"
            )
        losses = [one for length, *values in rows for one in values[: int(length)]]
        # Infinities and not-a-number have one sum in any order; fsum refuses some of them.
        is_finite = all(map(math.isfinite, losses))
        return (math.fsum(losses) if is_finite else sum(losses)) / count

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        parameters: Iterable[Tensor] | None = None,
    ) -> float:
        """Scale the gradients so that their norm is at most ``max_norm``; return what it was.

        The norm, 1, 2 or infinity, is right to 15 digits, and the same whoever holds the gradients.
        Of the parameters of the model unless others are given. Every rank has to call.
        """
        if norm_type not in (1, 2, math.inf):
            raise PlacementError(
                f"ElasticSteps.clip_grad_norm_: the norm is 1, 2 or infinity, not {norm_type}"
            )
        chosen = self._model.parameters() if parameters is None else parameters
        grads = [parameter.grad for parameter in chosen if parameter.grad is not None]
        counted = [_local(grad) for grad in grads if self._counts(grad)]
        found = norm(counted, norm_type, self._mesh)
        if error_if_nonfinite and not math.isfinite(found):
            raise RuntimeError(
                f"the total norm of order {norm_type} of gradients is {found}, so it cannot be "
                "clipped; leave error_if_nonfinite out to scale by it all the same"
            )
        scale = min(max_norm / (found + 1e-6), 1.0)
        for grad in grads:
            grad.mul_(math.nan if math.isnan(found) else scale)
        return found

    def state_dict(self) -> StepsState:
        """Return what is needed to go on, on any mesh."""
        return StepsState(
            seed=self._seed,
            group=self._group,
            count=self.count,
            environment=environment(self._mesh.device),
        )

    def load_state_dict(self, state: StepsState | Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called.

        Raises PlacementError for another seed or group, and on machines or with settings on which
        results may have other bits, unless ``any_environment`` was given.
        """
        faults = [
            f"{name} {state[name]}, now {own}"
            for name, own in (("seed", self._seed), ("group", self._group))
            if state[name] != own
        ]
        if not self._any_environment:
            faults += differences(state["environment"], environment(self._mesh.device))
        if faults:
            raise PlacementError(
                f"ElasticSteps: the training was saved with {'; '.join(faults)}: its bits would "
                "differ from here on. Set the same, or pass any_environment=True to go on with "
                "other machines and settings"
            )
        self.count = state["count"]

    def _seed_of(self, group: int) -> int:
        text = f"{self._seed} {self.count} {group}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")

    def _gradients(self) -> list[Gradients]:
        held = [one.parameter for unit in self._units for one in unit.held]
        leaves = LeafGradients(self._model, self._mesh, held)
        return [*(UnitGradients(unit, self._mesh) for unit in self._units), leaves]

    def _agree(self, batch: Sequence[Tensor]) -> int:
        """Return how many groups a batch has.

        Raises PlacementError, on all ranks, where one of them cannot take the step, or where they
        differ in what results depend on.
        """
        groups, of_batch, of_plain, fault = 0, "", "", None
        try:
            require_deterministic(self._mesh.device)
            refuse_running_statistics(self._model)
            groups = num_groups(batch, self._group)
            of_batch = describe(batch)
            of_plain = "" if self._is_compared else f"{code_of(describe(self._plain())):x}"
        except PlacementError as error:
            fault = error
        now: Environment = environment(self._mesh.device)
        named = {
            "seed": str(self._seed),
            "group": str(self._group),
            "count of steps": str(self.count),
            "batch": of_batch,
            "plain parameter or buffer": of_plain,
            **now,
        }
        codes = [code_of(value) for value in named.values()]
        rows = gather_rows([*codes, int(fault is not None)], self._mesh)
        if fault is not None:
            raise fault
        refused = [at for at, row in rows.items() if row[-1]]
        if refused:
            raise PlacementError(
                f"ElasticSteps.step: the ranks at {refused[:4]} of mesh {self._mesh.layout_mesh} "
                "cannot take the step; their errors say why"
            )
        first = next(iter(rows.values()))
        for place, (name, value) in enumerate(named.items()):
            others = [at for at, row in rows.items() if row[place] != first[place]]
            if others:
                raise PlacementError(
                    f"ElasticSteps.step: the ranks at {others[:4]} of mesh "
                    f"{self._mesh.layout_mesh} have another {name} than the first "
                    f"(this rank has {value}); results would depend on who runs which element"
                )
        self._is_compared = True
        return groups

    def _plain(self) -> list[Tensor]:
        """Return parameters and buffers of which only their values tell whether they are alike."""
        every = (*self._model.parameters(), *self._model.buffers())
        return [tensor for tensor in every if not isinstance(tensor, Wrapper)]

    def _counts(self, grad: Tensor) -> bool:
        """Whether this rank is the one that counts what it has of a gradient."""
        here = self._mesh.get_coordinate() or ()
        if not isinstance(grad, Wrapper):
            return not any(here)
        at = grad.spec.mesh.get_coordinate() or ()
        return not any(i for i, p in zip(at, grad.spec.placements, strict=True) if not p.is_shard())


def _local(grad: Tensor) -> Tensor:
    return grad.local if isinstance(grad, Wrapper) else grad
