"""What one ``with`` block of ``CommDebugMode`` sees: collectives, operators, calls of modules."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from ..comm.traffic import (
    Collective,
    Observer,
    add_observer,
    call_site,
    is_issuing,
    remove_observer,
)
from ..geometry.placement import format_placements
from ..tensor.arguments import collect_tensors
from ..tensor.schemas import base_name
from ..tensor.wrapper import Wrapper
from .module_tracker import ModuleTracker, Place
from .torch_collectives import collective_of, is_collective

MAX_OPERATORS = 1_000_000
"""Calls of operators that are remembered; later ones are only counted."""

_NAMES_OF_MEMORY = (
    "_local_scalar_dense _to_copy _wrap_tensor_autograd alias clone copy_ detach empty"
    " empty_like empty_strided fill_ full full_like is_same_size lift_fresh new_empty"
    " new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor wait_tensor"
    " zero_ zeros zeros_like"
)
_MOVES_NOTHING = frozenset(_NAMES_OF_MEMORY.split())
"""Operators, besides views, that only make or copy memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCollective:
    """A collective, and where it was issued."""

    place: Place
    collective: Collective
    site: str
    """``file:line in function`` of the caller's code; empty where there is none."""

    @property
    def kind(self) -> str:
        """The kind of what was asked for; ``collective`` has the kind of what was issued for it."""
        asked = self.collective.asked
        return self.collective.kind if asked is None else asked.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOperator:
    """A call of an operator."""

    place: Place
    name: str
    is_trivial: bool
    inputs: tuple[str, ...]
    """Shape, and placements if it is distributed, of every tensor it was given."""
    is_distributed: bool
    started: float
    seconds: float


class Recording(Observer):
    """Collects what a thread does from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self.tracker = ModuleTracker()
        self.collectives: list[SeenCollective] = []
        self.operators: list[SeenOperator] = []
        self.num_forgotten = 0
        """Calls of operators that were more than can be remembered."""
        self.started = time.perf_counter()
        self._seconds: dict[int, float] = {}

    def start(self) -> None:
        """Begin."""
        self.tracker.start()
        add_observer(self)

    def stop(self) -> None:
        """End; what was begun, such as a save in the background, is followed to its end."""
        remove_observer(self)
        self.tracker.stop()

    def issued(self, collective: Collective) -> None:
        """Remember a collective."""
        place = self.tracker.place()
        seen = SeenCollective(place=place, collective=collective, site=call_site())
        self.collectives.append(seen)

    def waited(self, collective: Collective, seconds: float) -> None:
        """Remember how long it took."""
        self._seconds[id(collective)] = seconds

    def seconds(self, seen: SeenCollective) -> float | None:
        """Return how long a collective took until it had been waited for, if it has been."""
        return self._seconds.get(id(seen.collective))

    def run_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operator that a mode has met, below autograd and above distributed tensors."""
        given: dict[str, Any] = kwargs or {}
        if is_collective(func):
            # What the library issues has been seen; its groups call torch's operators in turn.
            collective = None if is_issuing() else collective_of(func, args, given)
            result = func(*args, **given)
            if collective is not None:
                self.issued(collective)
            return result
        started = time.perf_counter()
        if any(issubclass(kind, TorchDTensor) for kind in types):
            # Its collectives are operators on local tensors, which come here only if it goes first.
            self.add_operator(func, args, given, started)
            return NotImplemented
        result = func(*args, **given)
        self.add_operator(func, args, given, started)
        return result

    def add_operator(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], started: float
    ) -> None:
        """Remember a call of an operator that has just returned."""
        if len(self.operators) >= MAX_OPERATORS:
            self.num_forgotten += 1
            return
        seconds = time.perf_counter() - started
        tensors: list[Tensor] = []
        collect_tensors([*args, *kwargs.values()], tensors)
        seen = SeenOperator(
            place=self.tracker.place(),
            name=str(op),
            is_trivial=op.is_view or base_name(op) in _MOVES_NOTHING,
            inputs=tuple(map(_described, tensors)),
            is_distributed=any(isinstance(t, Wrapper | TorchDTensor) for t in tensors),
            started=started,
            seconds=seconds,
        )
        self.operators.append(seen)


def _described(tensor: Tensor) -> str:
    shape = str(list(tensor.shape))
    if isinstance(tensor, Wrapper):
        return f"{shape} ({format_placements(tensor.spec.placements)})"
    if isinstance(tensor, TorchDTensor):
        return f"{shape} ({', '.join(map(str, tensor.placements))})"
    return shape
