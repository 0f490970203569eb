"""Which memory of a training changes in the steps of its optimizers only.

Parameters, trained or frozen, and the state of optimizers. Not what forward passes write (buffers),
nor what the program writes when it likes: averages of weights, counters, tensors of nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch.optim import Optimizer

from ...dtensor.torch_private import storage_id
from ..optimizers.spread import owned_part
from ..tensors.subclasses import is_subclass

Spreading = bool | Literal["checked"] | Sequence[torch.nn.Module | Optimizer]
"""Whether copies are spread over the training, and of what, if not of what is in the state."""

_MIN_BYTES = 32 << 10
"""What is smaller is copied sooner than watched."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """A tensor whose elements lie between two addresses."""

    tensor: torch.Tensor
    start: int
    stop: int
    is_quiet: bool


@dataclass(frozen=True, slots=True)
class Quiet:
    """Memory that changes in steps of optimizers only."""

    holders: dict[int, list[_Holder]] = field(default_factory=dict[int, list[_Holder]])
    """The tensors that lie in a storage, by its id, DTensors and their local tensors both: torch
    counts a write with the one of the two through which it is done."""
    trained: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Parameters of optimizers, which get gradients."""

    def holders_of(self, source: torch.Tensor) -> list[torch.Tensor] | None:
        """Return what lies in the memory of a tensor that need not be copied at once; else None."""
        if source.nbytes < _MIN_BYTES or not (source.is_cpu or source.is_cuda):
            return None
        if source.is_conj() or source.is_neg():
            return None
        start, stop = _extent(source)
        found = [
            one
            for one in self.holders.get(storage_id(source), ())
            if one.start < stop and start < one.stop
        ]
        # Parameters may share one storage with what is none of them, such as a buffer.
        if not any(one.is_quiet and one.start <= start and stop <= one.stop for one in found):
            return None
        return [one.tensor for one in found]

    def watch(self, source: torch.Tensor) -> None:
        """Count what is written through a tensor of the state, too, if it lies in such a storage.

        Tensors that share memory by way of ``.data`` have their writes counted apart.
        """
        found = self.holders.get(storage_id(source)) if source.nbytes else None
        if found is not None:
            found.append(_Holder(source, *_extent(source), is_quiet=False))

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor, or DTensor, among those that lie in quiet memory."""
        local = local_of(tensor)
        if is_subclass(local):  # without memory; what it consists of is copied at once
            return
        if tensor.is_inference() or local.layout is not torch.strided or local.is_meta:
            return
        found = self.holders.setdefault(storage_id(local), [])
        # A view counts the writes to what it is of, and stays that where tensors are swapped.
        extent = _extent(local)
        found.append(_Holder(local.detach(), *extent, is_quiet=True))
        if local is not tensor:
            found.append(_Holder(tensor, *extent, is_quiet=True))


def require_spreading(spread: object) -> None:
    """Raise ValueError for a choice of what is spread that is none."""
    kinds = torch.nn.Module | Optimizer
    if isinstance(spread, bool) or spread == "checked":
        return
    if not isinstance(spread, list | tuple) or not all(isinstance(one, kinds) for one in spread):
        raise ValueError(
            "spread is True, False, 'checked', or a list of modules and torch.optim.Optimizers, "
            f"got {spread!r}"
        )


def quiet_memory(spread: Spreading, objects: Iterable[Any]) -> Quiet:
    """Return the quiet memory of the objects of a state, or of those that the caller has named.

    Of modules in a state those count that have a parameter of an optimizer: others may be averages,
    or teachers. Who names one knows it.
    """
    are_named = not isinstance(spread, bool | str)
    found = list(spread if are_named else objects)
    quiet = Quiet()
    for value in found:
        for optimizer in _optimizers(value):
            quiet.trained.extend(_params_of(optimizer))
            for tensor in _state_of(optimizer):
                quiet.add(tensor)
    known = set(map(id, quiet.trained))
    for parameter in quiet.trained:
        quiet.add(parameter)
    for module in found:
        if isinstance(module, torch.nn.Module):
            parameters = {id(parameter): parameter for parameter in module.parameters()}
            if are_named or not known.isdisjoint(parameters):
                for number in parameters.keys() - known:
                    quiet.add(parameters[number])
                known |= parameters.keys()
    return quiet


def storages_of(optimizer: Optimizer) -> Iterator[int]:
    """Yield the ids of the storages in which parameters and state of an optimizer lie."""
    for tensor in (*_params_of(optimizer), *_state_of(optimizer)):
        local = local_of(tensor)
        if local.layout is torch.strided and not is_subclass(local):
            yield storage_id(local)


def local_of(tensor: Any) -> torch.Tensor:
    """Return the tensor in which the elements of this rank lie."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _optimizers(value: Any) -> Iterator[Optimizer]:
    """Yield an optimizer, and the one with the state of what this rank owns."""
    if isinstance(value, Optimizer):
        yield value
        owned = owned_part(value)
        if owned is not None:
            yield owned


def _params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for entry in cast("dict[Any, Any]", optimizer.state).values():
        if isinstance(entry, dict):
            for value in cast("dict[str, Any]", entry).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address at which a tensor begins, and where its last element ends."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
