"""Which saved parameter each parameter of an optimizer is.

Every name, of the state and of the checkpoint, is looked up in one table of each side, so what
wrappers add, ties, new names and names within modules are understood in one way. Where a name could
mean several parameters it means none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from ..files.stored_tensor import StoredTensor
from ..state.tree import below
from .named_state import SavedOptimizer, SavedParam
from .param_names import ParamNames, plain_name
from .wrappers import TensorNames, inner_name, without_wrappers

_REMEDY = (
    "Have the module beside the optimizer in the state, which select= may leave as it is, or "
    "construct the optimizer from named_parameters(), at save and at load"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveParam:
    """A parameter of an optimizer, by names without the marks of ranks."""

    names: tuple[str, ...]
    """Its own names in the state, as they are in the checkpoint (``rename=``)."""
    unrenamed: tuple[str, ...]
    """Those of its names in the state that are others in the checkpoint."""
    given: str | None
    """Name that the optimizer was given for it, as a component of names; None where ``rename=`` has
    given it another one within its module."""

    def inner_names(self) -> list[str]:
        """Return its names within modules."""
        return [*map(inner_name, self.names), *([] if self.given is None else [self.given])]


@dataclass
class Tables:
    """The names of all tensors on both sides, without the marks of ranks; made when asked for."""

    names: ParamNames
    rename: Callable[[str], str] | None
    stored: Mapping[str, StoredTensor]
    """The tensors of the checkpoint, but for those of other ranks alone."""

    @property
    def state(self) -> TensorNames[torch.Tensor]:
        """The state, as named in it."""
        return self.names.apart

    @cached_property
    def stored_names(self) -> TensorNames[StoredTensor | str]:
        """The checkpoint."""
        return TensorNames(self.stored, _tied_to)

    @cached_property
    def renamed(self) -> TensorNames[torch.Tensor]:
        """The state, as named in the checkpoint."""
        return self.state if self.rename is None else self.names.renamed(self.rename)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Which saved parameter each parameter of an optimizer is."""

    partners: tuple[SavedParam | None, ...]
    beside: tuple[StoredTensor | None, ...]
    """The parameters themselves in the checkpoint, where they are known."""
    by_position: frozenset[int]
    """Positions of parameters that only their number tells."""
    problems: tuple[str, ...]


def pair(
    optimizer: str,
    params: Sequence[LiveParam],
    sizes: Sequence[int],
    saved: SavedOptimizer,
    tables: Tables,
) -> Pairing:
    """Find the saved parameter of each parameter of an optimizer.

    A path is compared with paths: those of one tensor, or of tied ones, are one. A name that
    ``rename=`` has changed counts as it was where the checkpoint has the new one, and nothing else
    is renamed to the old one: values may come from elsewhere than state.
    Where one side knows a parameter by its name within a module alone, that is compared. The number
    counts where neither side has a name, or the checkpoint has none for any, if the groups (of
    ``sizes``) have as many parameters on both.
    """
    pairs = _Pairs(optimizer, params, saved, tables)
    pairs.by_paths()
    pairs.by_inner_names()
    by_position = pairs.by_position()
    if by_position and tuple(sizes) != saved.sizes:
        pairs.problems.append(
            f"{below(saved.at, 'state')}: nothing tells the names of parameters "
            f"{sorted(by_position)[:5]}, and by their order they cannot be told: saved are groups "
            f"of {list(saved.sizes)} parameters, wanted are {list(sizes)}. {_REMEDY}"
        )
    return Pairing(
        partners=tuple(pairs.partners),
        beside=tuple(map(pairs.stored_tensor, pairs.partners)),
        by_position=by_position,
        problems=tuple(dict.fromkeys(pairs.problems)),
    )


class _Pairs:
    """Pairs that have been found so far."""

    def __init__(
        self, optimizer: str, params: Sequence[LiveParam], saved: SavedOptimizer, tables: Tables
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.saved = saved
        self.tables = tables
        self.partners: list[SavedParam | None] = [None] * len(params)
        self.free = dict.fromkeys(saved.params)
        self.problems: list[str] = []
        stored: TensorNames[Any] = TensorNames(tables.stored, _tied_to)
        named = [(param, param.name) for param in saved.params if param.name is not None]
        found = [(param, name, stored.find(name)) for param, name in named]
        unsaved = {name: name for _, name, place in found if place is None and "/" in name}
        self.stored = TensorNames({**tables.stored, **unsaved}, _tied_to) if unsaved else stored
        self.places = {p: place or name for p, name, place in found if place or name in unsaved}
        """The saved parameters of which a path is known, with the names of their own tensors."""

    def stored_tensor(self, partner: SavedParam | None) -> StoredTensor | None:
        """Return the saved parameter itself, where it is known."""
        place = None if partner is None else self.places.get(partner)
        return None if place is None else self.tables.stored.get(place)

    def by(
        self,
        wanted: Mapping[LiveParam, Sequence[str]],
        offered: Mapping[SavedParam, str],
    ) -> None:
        """Pair those that are left and have something in common, if no others have the same."""
        found: dict[str, list[SavedParam]] = {}
        for param, key in offered.items():
            if param in self.free:
                found.setdefault(key, []).append(param)
        claims: dict[SavedParam, list[int]] = {}
        for number, param in enumerate(self.params if found else ()):
            if self.partners[number] is not None:
                continue
            others = next((found[key] for key in wanted.get(param, ()) if key in found), [])
            if len(others) > 1:
                self.problems.append(
                    f"{below(self.saved.at, 'state')}: parameter {number} of {self.optimizer} may "
                    f"be any of {[other.name for other in others[:5]]}. {_REMEDY}"
                )
            elif others:
                claims.setdefault(others[0], []).append(number)
        for other, numbers in claims.items():
            if len(numbers) == 1:
                self.partners[numbers[0]] = other
                del self.free[other]
            else:
                self.problems.append(
                    f"{other.at}: more than one parameter may be this one: parameters "
                    f"{numbers[:5]} of {self.optimizer}. {_REMEDY}"
                )

    def by_paths(self) -> None:
        """Pair by the names of the parameters themselves, then by those of tied ones."""
        tables = self.tables
        self.by_places(
            {p: self.places_of(p.names, lambda n: tables.renamed.is_clear(n)) for p in self.params}
        )
        if any(param.unrenamed for param in self.params):
            taken = {self.stored.find(name) for name in tables.renamed.tensors}
            wanted = {
                param: self.places_of(param.unrenamed, tables.state.is_clear)
                for param in self.params
                if any(map(self.stored.find, param.names))  # its values come from elsewhere
            }
            self.by_places(
                {param: [p for p in places if p not in taken] for param, places in wanted.items()}
            )

    def by_places(self, wanted: Mapping[LiveParam, list[str]]) -> None:
        """Pair by names of stored tensors, then by what they are tied to."""
        self.by(wanted, self.places)
        if self.free:
            tensors = self.stored.tensors
            self.by(
                {p: [_tied_to(tensors[place]) for place in places] for p, places in wanted.items()},
                {p: _tied_to(tensors[place]) for p, place in self.places.items()},
            )

    def places_of(self, names: Iterable[str], is_clear: Callable[[str], bool]) -> list[str]:
        """Return the stored tensors that some names of a parameter mean."""
        found = [(name, self.stored.find(name)) for name in names]
        return [p for name, p in found if p is not None and (p == name or is_clear(name))]

    def by_inner_names(self) -> None:
        """Pair by names within modules where one side has no other."""
        if not self.free:
            return
        saved = {param: param.name for param in self.saved.params if param.name is not None}
        alone = {param: name for param, name in saved.items() if param not in self.places}
        inner = {param: inner_name(name) for param, name in saved.items()}
        given = {param: [param.given] for param in self.params if param.given is not None}
        in_modules = {param: list(map(inner_name, param.names)) for param in self.params}
        given_alone = {param: names for param, names in given.items() if not param.names}
        shorten: tuple[Callable[[str], str], ...] = (str, self.without_wrappers)
        for short in shorten:
            for wanted, offered in ((given, alone), (in_modules, alone), (given_alone, inner)):
                if self.free:
                    self.by_names(wanted, offered, short)

    def by_names(
        self,
        wanted: Mapping[LiveParam, Sequence[str]],
        offered: Mapping[SavedParam, str],
        short: Callable[[str], str],
    ) -> None:
        """Pair by what ``short`` leaves of names, unless wrappers make them mean others."""
        unsure = _unsure(chain.from_iterable(wanted.values()), offered.values())

        def key(name: str) -> str:
            return unsure.get(name) or short(name)

        self.by(
            {param: list(map(key, names)) for param, names in wanted.items()},
            {param: key(name) for param, name in offered.items()},
        )

    def without_wrappers(self, name: str) -> str:
        """Return a name within a module without what wrappers add, unless that tells too little."""
        clear = self.tables.renamed.is_clear(name) and self.stored.is_clear(name)
        return without_wrappers(name) if clear else name

    def by_position(self) -> frozenset[int]:
        """Pair by numbers what has no names; return which these are."""
        left = {param.position: param for param in self.free}
        none_saved = all(param.name is None for param in self.saved.params)
        found: set[int] = set()
        for number, param in enumerate(self.params if left else ()):
            other = left.get(number)
            if self.partners[number] is not None or other is None or other.name is not None:
                continue
            inner = param.inner_names()
            if inner and not none_saved:
                continue  # it would have been saved by its name
            self.partners[number] = other
            found.add(number)
            given = None if other.given is None else without_wrappers(other.given)
            if inner and given is not None and given not in map(without_wrappers, inner):
                self.problems.append(
                    f"{other.at}: saved as parameter {number} {other.given!r}, but parameter "
                    f"{number} of {self.optimizer} is {inner[0]!r}. {_REMEDY}"
                )
        named = [param.name for param in self.free if param.name is not None]
        if named and self.params and not any(param.inner_names() for param in self.params):
            self.problems.append(
                f"{self.optimizer}: nothing tells the names of its parameters, and they were saved "
                f"by name ({', '.join(named[:3])}). {_REMEDY}"
            )
        return frozenset(found)


def _unsure(wanted: Iterable[str], offered: Iterable[str]) -> dict[str, str]:
    """Return names of which wrappers were added to, or left out, where not each has one partner.

    With what is left of them. Equal ones need not be the same: ``a`` in a wrapper is ``module.a``,
    as is the ``a`` of a part called ``module``.

    >>> _unsure(["a", "module.a"], ["module.a", "module.module.a"])["module.a"]
    'a'
    >>> _unsure(["a", "module.a", "b"], ["module.a", "module.b"])
    {}
    """
    sides: list[dict[str, set[str]]] = []
    for names in (wanted, offered):
        alike: dict[str, set[str]] = {}
        for name in names:
            alike.setdefault(without_wrappers(name), set()).add(name)
        sides.append(alike)
    ours, theirs = sides
    return {
        name: short
        for short in ours.keys() & theirs.keys()
        if len(ours[short] | theirs[short]) > 2
        and not (ours[short] <= theirs[short] or theirs[short] <= ours[short])
        for name in ours[short] | theirs[short]
    }


def _tied_to(tensor: StoredTensor | str) -> str:
    return tensor if isinstance(tensor, str) else plain_name(tensor.same_as or tensor.name)
