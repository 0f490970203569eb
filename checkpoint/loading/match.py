"""What of a state the checkpoint has, and what is to be called once it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..tensors.materialising import Replaced
from ..tensors.visiting import after_its_parts

Rebuild = Callable[[], Any]
"""Returns what a value of the template has become; None in its place says that it stays."""
Finisher = Callable[[Replaced], object]


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Match:
    """What of a template the checkpoint has, and what not; by names in the checkpoint."""

    destinations: dict[str, Any] = field(default_factory=dict[str, Any])
    """Tensors and arrays to be filled, by the name of the stored tensor. What stands here when the
    state is rebuilt takes the place of tensors without memory."""
    own: set[str] = field(default_factory=set[str])
    """Destinations that this rank keeps for itself."""
    values: list[str] = field(default_factory=list[str])
    """Other leaves that take a saved value."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Leaves of the template that the checkpoint does not have, with their name in the state."""
    absent: dict[str, Any] = field(default_factory=dict[str, Any])
    """The tensors among the missing ones."""
    tied: dict[str, str] = field(default_factory=dict[str, str])
    """Tensors of the template that the checkpoint does not have, and that are the very memory of a
    destination, by its name: they are filled with it."""
    unexpected: list[str] = field(default_factory=list[str])
    """Leaves of the checkpoint that the template does not have."""
    dropped: list[str] = field(default_factory=list[str])
    """Values that ranks kept for themselves which take no part now."""
    problems: list[str] = field(default_factory=list[str])
    """Leaves that are there on both sides but cannot be the same thing."""
    by_position: list[str] = field(default_factory=list[str])
    """State of parameters of optimizers that nothing but their number tells."""
    cleared: list[str] = field(default_factory=list[str])
    """State of parameters of optimizers that the checkpoint has none of, by names in the state."""
    kept: list[str] = field(default_factory=list[str])
    """Values (PerRank, PerCoordinate) that this rank keeps, since it had none at the save."""
    dealt: list[str] = field(default_factory=list[str])
    """Values (PerCoordinate) that a rule makes of those of other coordinates."""
    adopters: dict[str, Finisher] = field(default_factory=dict[str, Finisher])
    """Calls of ``load_state_dict`` of modules without memory, by the name of the object. They add
    to what took the place of tensors without memory."""
    finishers: dict[str, Finisher] = field(default_factory=dict[str, Finisher])
    """Calls of ``load_state_dict`` of other objects, which are given what the adopters added to."""
    last: set[str] = field(default_factory=set[str])
    """Names of the objects whose calls come after all others."""
    leaves: list[str] = field(default_factory=list[str])
    """All leaves of the checkpoint, in the order that all ranks know."""
    idle: list[str] = field(default_factory=list[str])
    """Keys of ``rename`` that are no name in the template."""
    objects: dict[str, Any] = field(default_factory=dict[str, Any])
    """Objects that stand for their state dicts, by their names in the state."""
    names_of_objects: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Destinations in each of them but optimizers, by names in the checkpoint."""
    fills_foreign: bool = False
    """Whether items are put into mappings of classes that are none of Python's."""
    rebuild: Rebuild = _nothing
    """Puts what has arrived into the containers of the template."""

    def note_ties(self, ties: Mapping[str, str]) -> None:
        """Take tensors for filled that are the memory of destinations; ``ties`` are all there are.

        Weights of Hugging Face leave out what a model ties.
        """
        for name, first in ties.items():
            if name in self.absent and first in self.destinations:
                self.tied[name] = first
                del self.missing[name]

    def filled_in_place_of(self, name: str) -> Any:
        """Return what an absent tensor has become: another one if it is tied to one."""
        first = self.tied.get(name)
        return self.absent[name] if first is None else self.destinations[first]

    @property
    def calls_back(self) -> bool:
        """Whether code of the user takes part in handing over what has arrived."""
        return bool(self.adopters or self.finishers or self.fills_foreign)

    def in_order(self) -> list[Finisher]:
        """Return all calls of ``load_state_dict`` in an order that ranks share."""
        return [
            calls[name]
            for calls in (self.adopters, self.finishers)
            for name in sorted(calls, key=lambda n: (n in self.last, after_its_parts(n)))
        ]

    def unexpected_mask(self) -> str:
        """Return a hex number whose bit i says that leaf i is unexpected: short, for many ranks."""
        unexpected = set(self.unexpected)
        bits = "".join("1" if leaf in unexpected else "0" for leaf in reversed(self.leaves))
        return f"{int(bits or '0', 2):x}"

    def names_of_mask(self, mask: str) -> list[str]:
        """Return the leaves of a mask."""
        bits = reversed(f"{int(mask, 16):b}")
        return [leaf for leaf, bit in zip(self.leaves, bits, strict=False) if bit == "1"]
