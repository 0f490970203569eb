"""The gradients of a unit: summed over the ranks in one collective for each kind of axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dtensor import DTensor
from ..geometry.placement import Partial, Shard
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_locals
from ..tensor.wrapper import Wrapper
from .custom_comms import ReduceScatter, Sharing, reduce_scatter
from .data_axes import DataAxes
from .held import Held
from .sharding import Reductions

Hook = Callable[[Tensor], None]


@dataclass(slots=True, eq=False)
class Gradients:
    """What a unit does with gradients, and what it has of earlier backward passes."""

    data: DataAxes
    reduces: bool = True
    """Whether a backward pass reduces gradients; else they wait."""
    all_reduces: bool = True
    """Whether it sums them over axes that repeat parameters, too; else the sums wait."""
    divide_factor: float | None = None
    hook: Hook | None = None
    hook_stream: Any = None
    reduce_scatter: ReduceScatter | None = None
    """What sums them over the ranks that share parameters in place of the library."""
    reduces_unused: bool = False
    """Whether parameters that no rank used get gradients of zeros."""
    waiting: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Sums of gradients that were not reduced yet, by the place of the parameter."""
    scattered: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Sums over the ranks that share a parameter, those of others not added yet; with them, at
    place -1, which parameters have one."""

    @property
    def are_pending(self) -> bool:
        """Whether some wait."""
        return bool(self.waiting or self.scattered)

    @property
    def are_due(self) -> bool:
        """Whether some wait that are not to wait any longer."""
        return self.reduces and bool(self.waiting or (self.scattered and self.all_reduces))

    def forget(self) -> None:
        """Drop what waits."""
        self.waiting.clear()
        self.scattered.clear()

    def add(self, place: int, local: Tensor) -> None:
        """Add a gradient of this rank to what waits."""
        before = self.waiting.get(place)
        if before is not None:
            self.waiting[place] = before + local
        else:
            self.waiting[place] = local if self.reduces else local.clone()

    def reduced(
        self, held: Sequence[Held], dtypes: Sequence[torch.dtype], *, anyway: bool = False
    ) -> list[Wrapper | None]:
        """Return the gradients of the sharded parameters; None where none came.

        ``dtypes`` are those in which they are summed. A parameter that only some ranks have used
        counts as zero on the others. Unless ``anyway``, what is to wait does.
        """
        found: list[Wrapper | None] = [None] * len(held)
        trained = [i for i, one in enumerate(held) if one.parameter.requires_grad]
        if not trained or not (self.reduces or anyway):
            return found
        op = "avg" if self.divide_factor is None else "sum"
        sent: list[Tensor] = []
        ways: list[Reductions] = []
        for i in trained:
            about = held[i].about
            way = about.reductions(op, dtypes[i])
            local = self.waiting.get(i)
            if local is None:
                device = way.terms.mesh.device
                local = torch.zeros(way.terms.local_shape, dtype=dtypes[i], device=device)
            elif self.divide_factor is not None:
                local = local / self.divide_factor
            if way.terms.ndim == 0 and about.model is None:
                local, way = self._told_to_all(local.view(1), op)
            sent.append(local)
            ways.append(way)
        # Of all, so that their number stays though parameters are frozen meanwhile.
        used = [float(i in self.waiting) for i in range(len(held))]
        votes = torch.tensor(used, dtype=sent[0].dtype, device=sent[0].device)
        votes, way = self._told_to_all(votes, op)
        sent.append(votes)
        ways.append(way)
        self.waiting.clear()
        moves = [(way.terms, way.scattered) for way in ways]
        if self.reduce_scatter is None or not self.data.num_shard:
            sums = redistribute_locals(sent, moves)
        else:
            sharing = Sharing.of_data(self.data)
            averages = self.divide_factor is None
            sums = reduce_scatter(self.reduce_scatter, sharing, sent, moves, averages=averages)
        for number, i in enumerate((*trained, -1)):
            before = self.scattered.pop(i, None)
            if before is not None:
                sums[number] = before + sums[number]
        if self.data.num_replicate:
            if not (self.all_reduces or anyway):
                self.scattered = dict(zip((*trained, -1), sums, strict=True))
                return found
            sums = redistribute_locals(sums, [(way.scattered, way.result) for way in ways])
            self.scattered.clear()  # also what parameters have that were frozen meanwhile
        *sums, votes = sums
        if self.hook is not None:
            sums = self._hooked(self.hook, sums)
        # Read only where this rank does not know it: a GPU is waited for then.
        has_all = self.reduces_unused or all(used[i] for i in trained)
        for i, local in zip(trained, sums, strict=True):
            if has_all or votes[i].item():
                found[i] = as_parameter(local, held[i])
        return found

    def _told_to_all(self, values: Tensor, op: str) -> tuple[Tensor, Reductions]:
        """Return values as terms of which each rank gets all sums, and how terms and sums lie.

        As many copies as there are ranks that share a parameter are sharded as gradients are, and
        so are reduced with them: another collective would cost more.
        """
        data = self.data
        copies = values.repeat(data.num_shards)
        kinds = (
            (Partial(op),) * data.mesh.ndim,
            data.placements(Shard(0), Partial(op)),
            data.placements(Shard(0)),
        )
        shape, dtype = tuple(copies.shape), copies.dtype
        return copies, Reductions(*(spec_of(data.mesh, k, shape, None, dtype) for k in kinds))

    def _hooked(self, hook: Hook, sums: Sequence[Tensor]) -> list[Tensor]:
        """Return what a hook leaves of the gradients, which it gets as one row for each dtype."""
        made = list(sums)
        stream = self.hook_stream
        for dtype in dict.fromkeys(one.dtype for one in sums):
            places = [i for i, one in enumerate(sums) if one.dtype == dtype]
            row = torch.cat([sums[i].reshape(-1) for i in places])
            if stream is None:
                hook(row)
            else:
                module: Any = torch.get_device_module(row.device)
                current = module.current_stream(row.device)
                stream.wait_stream(current)
                with module.stream(stream):
                    hook(row)
                current.wait_stream(stream)
            for i, part in zip(places, row.split([sums[i].numel() for i in places]), strict=True):
                made[i] = part.clone().view(sums[i].shape)
        return made


def as_parameter(local: Tensor, held: Held) -> Wrapper:
    """Return a sum as the gradient of the sharded parameter, which may lie on another device."""
    spec: DTensorSpec = held.sharded.spec.with_dtype(held.grad_dtype or local.dtype)
    made = local.to(spec.dtype).contiguous().view(spec.local_shape)
    like = held.sharded.local
    if like.device != made.device:
        # Waited for: autograd may add to the gradient at once, and hooks may read it.
        there = torch.empty_like(made, device=like.device, pin_memory=like.is_pinned())
        made = there.copy_(made)
    return DTensor(made, spec)
