"""The parameters of one module that are gathered, freed and reduced together.

What autograd keeps of a whole parameter for the backward pass is a note of which part of it is
meant (``saved_tensors_hooks``): its memory is free between the passes, and whoever needs it first
gathers it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Partial, Placement, Shard
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_locals
from ..tensor.compilers import opaque
from ..tensor.local_parts import is_aligned
from ..tensor.wrapper import Wrapper
from ..torch_private import num_writes, parameters_of, saved_hooks, storage_id
from .policies import MixedPrecisionPolicy
from .sharding import DataAxes, ShardedParameter

Place = tuple[nn.Module, str]
Versions = list[tuple[int, torch.dtype]]


@dataclass(slots=True, eq=False)
class Held:
    """A parameter of a unit: where it stands, sharded, and what it is when whole."""

    about: ShardedParameter
    places: list[Place]
    original: ref[nn.Parameter]
    """What it was before it was sharded: others may stand where it still is."""
    parameter: nn.Parameter
    whole: Tensor | None = None
    """The local tensor of the whole parameter, while that is whole."""
    waiting: Tensor | None = None
    """The sum of gradients that were not reduced yet."""

    @property
    def sharded(self) -> Wrapper:
        """The sharded parameter."""
        return cast(Wrapper, self.parameter)

    def follow(self) -> None:
        """Take up the parameter that stands in its place: ``to_empty`` and loads put others there.

        Raises PlacementError where that lies otherwise.
        """
        module, name = self.places[0]
        found = parameters_of(module)[name]
        if found is self.parameter or not isinstance(found, nn.Parameter):
            return
        about = self.about
        spec = found.spec if isinstance(found, Wrapper) else None
        if spec is None or spec.with_dtype(about.sharded.dtype) is not about.sharded:
            raise PlacementError(
                f"{about.name!r} was replaced by a parameter that is not sharded alike: expected "
                f"{about.sharded}, got {spec or f'a plain tensor of {list(found.shape)}'}; load "
                "state dicts without assign=True, or with DTensors that lie as the parameters"
            )
        self.parameter = found


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters that move in common collectives, and what has been asked of them."""

    held: list[Held]
    data: DataAxes
    precision: MixedPrecisionPolicy
    reshard_after_forward: bool | None
    """None for all units but that of the outermost module."""
    reshards_after_backward: bool = True
    reduces: bool = True
    """Whether a backward pass reduces gradients; else they wait."""
    divide_factor: float | None = None
    take: Callable[[Sequence[Tensor | None]], None] | None = None
    """What gets the gradients of a backward pass in place of their mean over the ranks."""
    versions: Versions | None = None
    """Counts of writes to the sharded parameters when they were gathered; None while not whole."""
    shown: list[Tensor] = field(default_factory=list)
    """What stands in the modules in the place of the parameters."""
    writes: list[int] = field(default_factory=list)
    """Counts of writes to ``shown`` when they were put there."""

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are whole."""
        return self.versions is not None

    def reshards_after_forward(self, *, is_root: bool) -> bool:
        """Whether the parameters are freed between the passes."""
        return not is_root if self.reshard_after_forward is None else self.reshard_after_forward

    def written(self) -> Versions:
        """Return what differs once a sharded parameter was written, alike on all ranks."""
        for one in self.held:
            one.follow()
        return [(num_writes(one.parameter), one.parameter.dtype) for one in self.held]

    def gather(self, *, anew: bool = False) -> None:
        """Make the parameters whole, unless they are, as they are now; ``anew`` in any case."""
        # Not inference tensors: what is kept may be needed by a training pass.
        with torch.inference_mode(False), torch.no_grad():
            versions = self.written()
            if versions == self.versions and not anew:
                return
            sources: list[Tensor] = []
            moves: list[tuple[DTensorSpec, DTensorSpec]] = []
            for one in self.held:
                dtype = self.dtype_of(one)
                sources.append(one.sharded.local.detach().to(dtype))
                moves.append(
                    (one.about.sharded.with_dtype(dtype), one.about.whole.with_dtype(dtype))
                )
            for one, source, found in zip(
                self.held, sources, redistribute_locals(sources, moves), strict=True
            ):
                # Memory of its own: nothing that is written to it is to reach the parameter. And as
                # aligned as new memory is: products of matrices may round by where those begin.
                shares = storage_id(found) in (storage_id(source), storage_id(one.sharded.local))
                made = found if found.is_meta or not shares else found.clone()
                one.whole = made if is_aligned(made) else made.clone()
            self.versions = versions

    def free(self) -> None:
        """Forget the whole parameters."""
        self.versions = None
        for one in self.held:
            one.whole = None

    def show(self, when_reduced: Callable[[], None] | None = None) -> None:
        """Put whole parameters in the place of the sharded ones; gradients flow to those.

        ``when_reduced`` is called once all gradients have come and gone.
        """
        given = [one.parameter for one in self.held]
        if torch.is_grad_enabled() and any(p.requires_grad for p in given):
            self.shown = list(_Whole.apply(self, when_reduced, *given))
        else:
            self.shown = self.wholes()
        self.writes = [num_writes(one) for one in self.shown if not one.is_inference()]
        for one, tensor in zip(self.held, self.shown, strict=True):
            for module, name in one.places:
                parameters_of(module)[name] = tensor

    def hide(self) -> None:
        """Put the sharded parameters back; PlacementError if whole ones were written meanwhile."""
        shown, self.shown = self.shown, []
        writes, self.writes = self.writes, []
        for one, tensor in zip(self.held, shown, strict=bool(shown)):
            for module, name in one.places:
                if parameters_of(module)[name] is tensor:
                    parameters_of(module)[name] = one.parameter
        if writes != [num_writes(one) for one in shown if not one.is_inference()]:
            self.free()
            raise PlacementError(
                "a module that fully_shard treated wrote to its parameters in its forward pass "
                f"(one of {', '.join(one.about.name for one in self.held)}), which changes a copy; "
                "write to them outside of it, or pass them as ignored_params"
            )

    def wholes(self) -> list[Tensor]:
        """Return new tensors that share the memory of the whole parameters."""
        found: list[Tensor] = []
        for one in self.held:
            local = cast(Tensor, one.whole).detach()
            model = one.about.model
            made = local if model is None else DTensor(local, model.with_dtype(local.dtype))
            found.append(made)
        return found

    def saving(self) -> saved_tensors_hooks:
        """Return a context within which autograd keeps notes of whole parameters.

        All else is kept as those want that were there before: activation checkpointing, say.
        """
        mine = {storage_id(cast(Tensor, one.whole)): one for one in self.held}
        outer = saved_hooks()

        def note(tensor: Tensor) -> Any:
            noted = self._noted(mine, tensor)
            if noted is not None:
                return noted
            return tensor if outer is None else _Outer(outer[0](tensor), outer[1])

        return saved_tensors_hooks(note, _recalled)

    def _noted(self, mine: dict[int, Held], tensor: Tensor) -> _Note | None:
        local = tensor.local if isinstance(tensor, Wrapper) else tensor
        one = mine.get(storage_id(local)) if local.layout == torch.strided else None
        if one is None or one.whole is None or local.dtype != one.whole.dtype:
            return None
        spec = tensor.spec if isinstance(tensor, Wrapper) else None
        part = local.size(), local.stride(), int(local.storage_offset())
        return _Note(self, one, cast(Versions, self.versions), part, spec)

    def reduced(self, grads: Sequence[Tensor | None]) -> list[Wrapper | None]:
        """Return the gradients of the sharded parameters, in one reduction; None where none came.

        A parameter that only some ranks have used counts as zero on the others. Where it was asked
        for, gradients wait instead, and are reduced with those of a later pass.
        """
        if self.take is not None:
            self.take(grads)
            return [None] * len(self.held)
        for one, grad in zip(self.held, grads, strict=True):
            if grad is not None:
                self._add(one, grad)
        found: list[Wrapper | None] = [None] * len(self.held)
        trained = [i for i, one in enumerate(self.held) if one.parameter.requires_grad]
        if not self.reduces or not trained:
            return found
        op = "avg" if self.divide_factor is None else "sum"
        sent: list[Tensor] = []
        moves: list[tuple[DTensorSpec, DTensorSpec]] = []
        for i in trained:
            one = self.held[i]
            dtype = self.sum_dtype_of(one)
            terms, sums = one.about.terms(op, dtype), one.about.sharded.with_dtype(dtype)
            local = one.waiting
            if local is None:
                local = torch.zeros(terms.local_shape, dtype=dtype, device=terms.mesh.device)
            elif self.divide_factor is not None:
                local = local / self.divide_factor
            if terms.ndim == 0 and one.about.model is None:
                local, (terms, sums) = self._told_to_all(local.view(1), op)
            sent.append(local)
            moves.append((terms, sums))
        used = [float(self.held[i].waiting is not None) for i in trained]
        votes = torch.tensor(used, dtype=sent[0].dtype, device=sent[0].device)
        votes, specs = self._told_to_all(votes, op)
        for i in trained:
            self.held[i].waiting = None
        *locals_, votes = redistribute_locals([*sent, votes], [*moves, specs])
        # Read only where this rank does not know it: a GPU is waited for then.
        has_all = all(used)
        for number, (i, local) in enumerate(zip(trained, locals_, strict=True)):
            if has_all or votes[number].item():
                spec = self.held[i].sharded.spec
                made = local.to(spec.dtype).contiguous().view(spec.local_shape)
                found[i] = DTensor(made, spec)
        return found

    def _told_to_all(
        self, values: Tensor, op: str
    ) -> tuple[Tensor, tuple[DTensorSpec, DTensorSpec]]:
        """Return values as terms of which each rank gets all sums, and how terms and sums lie.

        As many copies as there are ranks are sharded as gradients are, and so are reduced with
        them: another collective would cost more.
        """
        mesh = self.data.mesh
        copies = values.repeat(mesh.shape[-1])
        terms: tuple[Placement, ...] = (Partial(op),) * mesh.ndim
        sums = self.data.placements(Shard(0))
        shape, dtype = tuple(copies.shape), copies.dtype
        specs = (spec_of(mesh, p, shape, None, dtype) for p in (terms, sums))
        return copies, cast("tuple[DTensorSpec, DTensorSpec]", tuple(specs))

    def _add(self, one: Held, grad: Tensor) -> None:
        local = one.about.gradient(grad).to(self.sum_dtype_of(one))
        if one.waiting is not None:
            one.waiting = one.waiting + local
        else:
            one.waiting = local if self.reduces else local.clone()

    def dtype_of(self, one: Held) -> torch.dtype:
        """Return the dtype of the whole parameter, and so of its gradients."""
        own = one.sharded.dtype
        return self.precision.param_dtype or own if own.is_floating_point else own

    def sum_dtype_of(self, one: Held) -> torch.dtype:
        """Return the dtype in which its gradients are summed."""
        return self.precision.reduce_dtype or self.dtype_of(one)


@dataclass(frozen=True, slots=True)
class _Note:
    """What stands for a part of a whole parameter between the passes."""

    unit: Unit
    held: Held
    versions: Versions
    part: tuple[torch.Size, tuple[int, ...], int]
    spec: DTensorSpec | None


@dataclass(frozen=True, slots=True)
class _Outer:
    """What other hooks made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _recalled(note: Any) -> Tensor:
    """Return the tensor that a note stands for; others are themselves."""
    if isinstance(note, _Outer):
        return note.unpack(note.packed)
    if not isinstance(note, _Note):
        return note
    unit = note.unit
    if unit.written() != note.versions:
        raise RuntimeError(
            f"{note.held.about.name!r}, or another parameter that is gathered with it, was written "
            "between the forward pass and the backward pass that needs it: step the optimizer "
            "after all backward passes"
        )
    unit.gather()
    local = torch.as_strided(cast(Tensor, note.held.whole), *note.part)
    return local if note.spec is None else DTensor(local, note.spec)


@opaque
class _Whole(torch.autograd.Function):
    """From sharded parameters to whole ones; back, gradients are reduced in one collective."""

    @staticmethod
    def forward(
        ctx: Any,
        unit: Unit,
        when_reduced: Callable[[], None] | None,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        """Return the whole parameters, which have been gathered."""
        ctx.unit, ctx.when_reduced = unit, when_reduced
        ctx.set_materialize_grads(False)
        made = unit.wholes()
        ctx.mark_non_differentiable(
            *[m for m, p in zip(made, parameters, strict=True) if not p.requires_grad]
        )
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of the sharded parameters."""
        found = ctx.unit.reduced(grads)
        if ctx.when_reduced is not None:
            ctx.when_reduced()
        return None, None, *found
