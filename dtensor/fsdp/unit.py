"""The parameters that are gathered, freed and reduced together, those of one module or of several.

What autograd keeps of a whole parameter for the backward pass is a note of which part of it is
meant (``notes``): its memory is free between the passes, and whoever needs it first gathers it
again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtckpt.errors import PlacementError

from ..comm.streams import SideStream
from ..dtensor import DTensor
from ..geometry.placement import Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_locals, start_redistribute_locals
from ..tensor.compilers import opaque
from ..tensor.local_parts import is_aligned
from ..tensor.wrapper import Wrapper
from ..torch_private import num_writes, parameters_of, storage_id
from .custom_comms import AllGather, Sharing, start_gather
from .data_axes import DataAxes
from .extensions import Extended, extended
from .gradients import Gradients
from .held import Held
from .policies import MixedPrecisionPolicy
from .sharding import is_subclass, plain_copy

Versions = list[tuple[int, int, torch.dtype]]
Move = tuple[DTensorSpec, DTensorSpec]


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Whole parameters on their way."""

    versions: Versions
    finish: Callable[[], list[Tensor]]
    sources: list[Tensor]
    extended: dict[int, Extended]
    """What is gathered for parameters whose classes say it, by their place among ``held``."""


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters that move in common collectives, and what has been asked of them."""

    held: list[Held]
    data: DataAxes
    precision: MixedPrecisionPolicy
    number: int
    """Among the units of a mesh, alike on all ranks."""
    gradients: Gradients
    reshard_after_forward: bool | int | None
    """None for all units but that of the outermost module; a number keeps parameters gathered
    among as many ranks."""
    smaller: DeviceMesh | None = None
    """The mesh of those."""
    reshards_after_backward: bool = True
    take: Callable[[Sequence[Tensor | None]], None] | None = None
    """What gets the gradients of a backward pass in place of their mean over the ranks."""
    versions: Versions | None = None
    """Counts of writes to the sharded parameters when they were gathered; None while not whole."""
    kept_versions: Versions | None = None
    """The same of what is kept between the passes; None where nothing is."""
    shown: list[Tensor] = field(default_factory=list)
    """What stands in the modules in the place of the parameters, or did and will in this pass."""
    marks: list[tuple[int, bool]] = field(default_factory=list)
    """Counts of writes to ``shown``, and what requires gradients, when they were put there."""
    memory: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which buffers of communication are allocated."""
    all_gather: AllGather | None = None
    """What gathers the parameters in place of the library."""
    stream: SideStream | None = None
    """Where they are gathered, if not on the stream of all units of the mesh."""
    keeps_storage: bool = False
    """Whether whole parameters lie at one place in memory each time."""
    is_extended: bool = False
    """Whether the class of a parameter said what to gather when they were gathered."""
    has_reduced: bool = False
    """Whether gradients came to be reduced in this backward pass."""
    _gathering: _Gathering | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are whole."""
        return self.versions is not None

    @property
    def is_coming(self) -> bool:
        """Whether the parameters are on their way."""
        return self._gathering is not None

    def written(self) -> Versions:
        """Return what differs once a sharded parameter was written, alike on all ranks."""
        for one in self.held:
            one.follow()
        return [
            (one.num_replaced, num_writes(one.parameter), one.parameter.dtype) for one in self.held
        ]

    def start_gathering(self, *, after: Any = None, later: bool = True) -> None:
        """Start to make the parameters whole, unless they are or will be, as they are now.

        ``after`` is an event that the accelerator waits for, instead of all that is queued. Unless
        ``later``, nothing else is sent before they are.
        """
        with torch.inference_mode(False), torch.no_grad():
            versions = self.written()
            coming = self._gathering
            if versions == self.versions or (coming is not None and coming.versions == versions):
                return
            self.drop()
            with self.side_stream().queued(after), self.memory():
                sources, moves, extensions = self._ways(versions)
                finish = self._gathers_by_user(sources, moves, versions)
                if finish is None:
                    finish = start_redistribute_locals(sources, moves, later=later)
            self._gathering = _Gathering(versions, finish, sources, extensions)

    def _ways(self, versions: Versions) -> tuple[list[Tensor], list[Move], dict[int, Extended]]:
        """Return what is gathered, of all ranks or of those that keep it between the passes."""
        sources: list[Tensor] = []
        moves: list[Move] = []
        extensions: dict[int, Extended] = {}
        smaller = self.smaller if versions == self.kept_versions else None
        device = self.data.mesh.device
        for place, one in enumerate(self.held):
            dtype, about = self.dtype_of(one), one.about
            if smaller is not None:
                sources.append(cast(Tensor, one.kept))
                moves.append(about.between_passes(smaller, dtype))
                continue
            extension = extended(one, self.data, self.precision, device)
            if extension is not None:
                sources += extension.sources
                moves += extension.moves
                extensions[place] = extension
                continue
            local = one.sharded.local
            local = plain_copy(local) if is_subclass(local) else local.detach()
            if not local.is_meta:
                local = local.to(device, dtype, non_blocking=True)
            sources.append(local)
            moves.append((about.sharded.with_dtype(dtype), about.whole.with_dtype(dtype)))
        tag = self._tag(self.data.mesh if smaller is None else smaller)
        if tag is not None:
            sources.append(tag[0])
            moves.append(tag[1])
        return sources, moves, extensions

    def _gathers_by_user(
        self, sources: Sequence[Tensor], moves: Sequence[Move], versions: Versions
    ) -> Callable[[], list[Tensor]] | None:
        """Start to gather by what the user has set for that, and return what waits for it."""
        comm, is_meta = self.all_gather, any(one.is_meta for one in sources)
        if comm is None or not sources or is_meta or not self.data.num_shard:
            return None
        smaller = self.smaller if versions == self.kept_versions else None
        sharing = Sharing.of_data(self.data) if smaller is None else Sharing.of_mesh(smaller)
        return start_gather(comm, sharing, sources, moves)

    def side_stream(self) -> SideStream:
        """Return the stream on which parameters are gathered."""
        if self.stream is not None:
            return self.stream
        mesh = self.data.mesh
        return mesh.state("fsdp_stream", lambda: SideStream(mesh.device))

    def gather(self, *, anew: bool = False, after: Any = None) -> None:
        """Make the parameters whole, unless they are, as they are now; ``anew`` in any case."""
        with torch.inference_mode(False), torch.no_grad():
            if anew and not self.is_coming:
                self.free()
            self.start_gathering(after=after, later=False)
            coming, self._gathering = self._gathering, None
            if coming is None:
                return
            # Not inference tensors: what is kept may be needed by a training pass.
            wholes: list[Tensor] = []
            with self.side_stream().resumed(lambda: wholes), self.memory():
                found = coming.finish()
                wholes, tags = self._arrived(coming, found)
            if tags is not None and not bool((tags == self.number).all()):
                raise PlacementError(
                    "ranks run different modules: this one gathers "
                    f"{', '.join(repr(one.about.name) for one in self.held)} of unit "
                    f"{self.number}, and the ranks of the mesh units {tags.tolist()}. All ranks "
                    "have to run the sharded modules in the same order"
                )
            for one, found in zip(self.held, wholes, strict=True):
                one.whole = found
                one.kept = None
            self.versions, self.kept_versions = coming.versions, None
            self.is_extended = bool(coming.extended)

    def _arrived(
        self, coming: _Gathering, found: list[Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the whole parameters, and the numbers of units that all ranks gather, if told."""
        wholes: list[Tensor] = []
        at = 0
        for place, one in enumerate(self.held):
            extension = coming.extended.get(place)
            if extension is not None:
                parts = found[at : at + len(extension.sources)]
                at += len(parts)
                wholes.append(extension.whole(one, parts, self.dtype_of(one)))
                continue
            whole = found[at]
            # Memory of its own: nothing written to it is to reach the parameter. And as aligned
            # as new memory: products of matrices may round by where those begin.
            given = (coming.sources[at], one.sharded.local)
            shares = not whole.is_meta and storage_id(whole) in map(storage_id, given)
            if shares or not is_aligned(whole):
                whole = whole.clone()
            wholes.append(one.in_storage(whole) if self.keeps_storage else whole)
            at += 1
        return wholes, found[at] if at < len(found) else None

    def _tag(self, mesh: DeviceMesh) -> tuple[Tensor, Move] | None:
        """Return the number of the unit, to be gathered beside the parameters, and how it moves.

        Only on CPUs, which need not wait for a device to look at it, and where the library gathers.
        """
        is_data = mesh is self.data.mesh
        axes = self.data.placements(Shard(0)) if is_data else (Shard(0),) * mesh.ndim
        size = self.data.num_shards if is_data else mesh.size()
        is_meta = any(one.parameter.is_meta for one in self.held)
        is_told = mesh.device.type == "cpu" and self.all_gather is None
        if not is_told or size == 1 or not self.held or is_meta:
            return None
        meta = (size,), None, torch.int64
        specs = spec_of(mesh, axes, *meta), spec_of(mesh, (Replicate(),) * mesh.ndim, *meta)
        return torch.tensor([self.number]), specs

    def drop(self) -> None:
        """Forget whole parameters that are on their way."""
        coming, self._gathering = self._gathering, None
        if coming is not None:
            coming.finish()  # what is under way needs its memory

    def free(self) -> None:
        """Forget the whole parameters."""
        self.drop()
        self.versions = self.kept_versions = None
        for one in self.held:
            one.whole = one.kept = None

    def keep_among(self, smaller: DeviceMesh | None) -> None:
        """Keep parameters between the passes on another mesh, and forget what lies on this one."""
        self.smaller, self.kept_versions = smaller, None
        for one in self.held:
            one.kept = None

    def shrink(self) -> None:
        """Keep of the whole parameters what a smaller group needs to gather them again."""
        versions, smaller = self.versions, self.smaller
        if versions is None or smaller is None:
            return
        if self.is_extended:  # parts of a whole parameter are not what its class has gathered
            self.free()
            return
        locals_ = [cast(Tensor, one.whole) for one in self.held]
        moves = [
            one.about.between_passes(smaller, local.dtype)
            for one, local in zip(self.held, locals_, strict=True)
        ]
        with torch.inference_mode(False), torch.no_grad():
            kept = redistribute_locals(locals_, [(whole, cut) for cut, whole in moves])
        self.free()
        for one, local in zip(self.held, kept, strict=True):
            one.kept = local
        self.kept_versions = versions

    def show(self, when_reduced: Callable[[], None] | None = None) -> None:
        """Put whole parameters in the place of the sharded ones; gradients flow to those.

        ``when_reduced`` is called once all gradients have come and gone.
        """
        given = [one.parameter for one in self.held]
        if torch.is_grad_enabled() and any(p.requires_grad for p in given):
            self.shown = list(_Whole.apply(self, when_reduced, *given))
        else:
            self.shown = self.wholes()
        self.show_again()

    def show_again(self) -> None:
        """Put what was shown before in this pass where it stood."""
        self.marks = self._marks()
        for one, tensor in zip(self.held, self.shown, strict=bool(self.shown)):
            for module, name in one.places:
                parameters_of(module)[name] = tensor

    def hide(self, *, later_again: bool = False) -> None:
        """Put the sharded parameters back; PlacementError if whole ones were changed meanwhile."""
        shown, marks, now = self.shown, self.marks, self._marks()
        self.marks = []
        for one, tensor in zip(self.held, shown, strict=bool(shown)):
            for module, name in one.places:
                if parameters_of(module)[name] is tensor:
                    parameters_of(module)[name] = one.parameter
        if not later_again:
            self.shown = []
        if marks and marks != now:
            self.shown = []
            self.free()
            raise PlacementError(
                "whole parameters that stood in a module that fully_shard treated (one of "
                f"{', '.join(one.about.name for one in self.held)}) were written to, or "
                "requires_grad of one was set, which changes a copy; change the sharded ones, "
                "which are there outside of its forward pass once reshard() was called, or pass "
                "them as ignored_params"
            )

    def _marks(self) -> list[tuple[int, bool]]:
        """Return what differs once a whole parameter that is shown was changed."""
        return [
            (0 if one.is_inference() else num_writes(one), one.requires_grad) for one in self.shown
        ]

    @property
    def stands(self) -> bool:
        """Whether whole parameters stand in the modules now."""
        if not self.shown:
            return False
        module, name = self.held[0].places[0]
        return parameters_of(module)[name] is self.shown[0]

    def wholes(self) -> list[Tensor]:
        """Return new tensors that share the memory of the whole parameters."""
        found: list[Tensor] = []
        for one in self.held:
            local = cast(Tensor, one.whole).detach()
            model = one.about.model
            made = local if model is None else DTensor(local, model.with_dtype(local.dtype))
            found.append(made)
        return found

    def reduced(self, grads: Sequence[Tensor | None]) -> list[Wrapper | None]:
        """Return the gradients of the sharded parameters, in one reduction; None where none came.

        Where it was asked for, gradients wait instead, and are reduced with those of a later pass.
        """
        self.has_reduced = True
        if self.take is not None:
            self.take(grads)
            return [None] * len(self.held)
        dtypes = [self.sum_dtype_of(one) for one in self.held]
        for place, (one, grad) in enumerate(zip(self.held, grads, strict=True)):
            if grad is not None:
                self.gradients.add(place, one.about.gradient(grad).to(dtypes[place]))
        with self.memory():
            return self.gradients.reduced(self.held, dtypes)

    def reduce_pending(self, *, anyway: bool = False) -> None:
        """Add to the gradients of the parameters what waits; ``anyway`` also if that is to wait."""
        gradients = self.gradients
        lacks_unused = gradients.reduces and gradients.reduces_unused and not self.has_reduced
        if not (gradients.are_pending if anyway else gradients.are_due or lacks_unused):
            return
        dtypes = [self.sum_dtype_of(one) for one in self.held]
        with torch.no_grad():
            grads = gradients.reduced(self.held, dtypes, anyway=anyway)
            for one, grad in zip(self.held, grads, strict=True):
                if grad is not None:
                    before = one.parameter.grad
                    one.parameter.grad = grad if before is None else before + grad

    def dtype_of(self, one: Held) -> torch.dtype:
        """Return the dtype of the whole parameter, and so of its gradients."""
        own = one.sharded.dtype
        is_cast = own.is_floating_point and not one.keeps_dtype
        return self.precision.param_dtype or own if is_cast else own

    def sum_dtype_of(self, one: Held) -> torch.dtype:
        """Return the dtype in which its gradients are summed."""
        return self.precision.reduce_dtype or one.grad_dtype or self.dtype_of(one)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        gradients = copy.copy(self.gradients)
        gradients.waiting = {i: tensor.clone() for i, tensor in self.gradients.waiting.items()}
        gradients.scattered = {i: tensor.clone() for i, tensor in self.gradients.scattered.items()}
        held = [
            Held(
                about=one.about,
                places=[(copy.deepcopy(module, memo), name) for module, name in one.places],
                origin=copy.deepcopy(one.origin, memo),
                parameter=copy.deepcopy(one.parameter, memo),
                keeps_dtype=one.keeps_dtype,
            )
            for one in self.held
        ]
        return Unit(
            held=held,
            data=self.data,
            precision=self.precision,
            number=self.number,
            gradients=gradients,
            reshard_after_forward=self.reshard_after_forward,
            smaller=self.smaller,
            reshards_after_backward=self.reshards_after_backward,
            memory=self.memory,
            all_gather=self.all_gather,
            stream=self.stream,
            keeps_storage=self.keeps_storage,
        )


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
