"""Matching an optimizer with its saved state, parameter by parameter and group by group.

Parameters are found by their names, see ``named_optimizer``. A group takes the settings that were
saved for its parameters, in whichever groups these were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .named_optimizer import (
    SavedOptimizer,
    SavedParam,
    is_numbered,
    named_state,
    pair,
    read_saved,
    settings_of,
)
from .optimizers import FreshState, load_optimizer, wrong_shapes
from .param_names import ParamLabel, params_of
from .tree import children, tag_of
from .tree_index import ABSENT, below

if TYPE_CHECKING:
    from .matching import Rebuild, Walk

_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs")
"""What schedulers of the learning rate keep for each group, by its position."""


def match_optimizer(
    walk: Walk, optimizer: torch.optim.Optimizer, name: str, state: Any
) -> Callable[[Any], object] | None:
    """Match an optimizer; return what hands it its state, or None where nothing is for it."""
    before = len(walk.found.destinations), len(walk.found.values)
    at = walk.at(below(name, "param_groups")).removesuffix("param_groups").rstrip("/")
    saved = read_saved(walk.index, at) if is_numbered(state) else None
    if saved is None:
        labels = walk.names.labels(optimizer)
        rebuild = walk.node(named_state(state, labels) or state, name)
        if rebuild is None or (len(walk.found.destinations), len(walk.found.values)) == before:
            return None
        return lambda replaced: load_optimizer(optimizer, rebuild(), replaced)
    match = _OptimizerMatch(walk, optimizer, name, state, saved)
    filled = match.run()
    if (len(walk.found.destinations), len(walk.found.values)) == before:
        return None  # nothing to hand over, and nothing may change
    return lambda replaced: load_optimizer(optimizer, filled(), replaced)


class _OptimizerMatch:
    """One optimizer whose state dict and saved state both have the usual form."""

    def __init__(
        self,
        walk: Walk,
        optimizer: torch.optim.Optimizer,
        name: str,
        state: dict[Any, Any],
        saved: SavedOptimizer,
    ) -> None:
        self.walk = walk
        self.optimizer = optimizer
        self.name = name
        self.state = state
        self.saved = saved
        self.labels: list[ParamLabel] = walk.names.labels(optimizer)
        self.fresh = FreshState(walk.index, walk.stored, walk.is_selected)
        self.partners: tuple[SavedParam | None, ...] = ()

    def run(self) -> Callable[[], dict[Any, Any]]:
        """Return what makes the state dict to be loaded, by the optimizer's own numbers."""
        walk, found = self.walk, self.walk.found
        sizes = [len(group["params"]) for group in self.state["param_groups"]]
        pairing = pair(
            [self.names_in_checkpoint(label) for label in self.labels],
            [label.given for label in self.labels],
            sizes,
            self.saved,
        )
        self.partners = pairing.partners
        if walk.selects_below(self.saved.at):
            found.problems += pairing.problems
            for position in sorted(pairing.by_position):
                self.compare_shapes(position)
        walk.taken.update(self.saved.leaves_of_params(walk.index))
        empty = (below(self.saved.at, part) for part in ("state", "param_groups"))
        walk.taken.update((*empty, *(p.at for p in self.partners if p is not None)))
        entries = self.match_entries()
        found.problems += self.fresh.problems
        groups = self.match_groups()
        others = {k: v for k, v in self.state.items() if k not in ("state", "param_groups")}
        rest = walk.node(others, self.name) if others else None
        found.problems += self.fresh.unfilled(found.destinations.values())

        def filled() -> dict[Any, Any]:
            return {**(rest() if rest else others), "state": entries(), "param_groups": groups()}

        return filled

    def names_in_checkpoint(self, label: ParamLabel) -> list[str]:
        """Return the names that a parameter may have been saved under, the best one first.

        Renamed like the parameter itself, or not: weights may come from elsewhere than the state.
        Of tied tensors each stands for the others.
        """
        names: list[str] = []
        for name in dict.fromkeys((*map(self.walk.at, label.names), *label.names)):
            stored = self.walk.stored.get(name)
            names += [name] if stored is None or stored.same_as is None else [name, stored.same_as]
        return list(dict.fromkeys(names))

    def own_name(self, position: int) -> str:
        """Return the name of the state of a parameter in the state that is loaded."""
        text = self.labels[position].text
        return f"{below(self.name, 'state')}/{f'#{position}' if text is None else text}"

    def compare_shapes(self, position: int) -> None:
        """Note where a parameter that was found by its position cannot be the saved one."""
        partner, param = self.partners[position], params_of(self.optimizer)[position]
        if partner is None:
            return
        self.walk.found.by_position.append(partner.at)
        beside = self.walk.stored.get(partner.name or "")
        if beside is not None and beside.shape != tuple(param.shape):
            self.walk.found.problems.append(
                f"{partner.at}: parameter {position} of {self.name} was matched by its position, "
                f"but has the shape {list(param.shape)} and {partner.name} was saved with "
                f"{list(beside.shape)}"
            )

    def match_entries(self) -> Callable[[], dict[Any, Any]]:
        """Match the state of every parameter, and what state there is beside."""
        walk = self.walk
        held: dict[Any, Any] = self.state["state"]
        entries: dict[Any, Any] = dict(held)
        rebuilds: dict[Any, Rebuild] = {}
        for position, param in enumerate(params_of(self.optimizer)):
            partner, own_name = self.partners[position], self.own_name(position)
            if partner is None:
                at = walk.at(own_name)
                if walk.is_selected(at):
                    walk.found.missing[at] = own_name
                continue
            if walk.cannot_reach(partner.at):
                continue
            entry = self.fresh.entry(held.get(position) or {}, partner.at, param)
            if walk.selects_below(partner.at):
                walk.found.problems += wrong_shapes(walk.index, walk.stored, partner.at, param)
            if not entry and position not in held:
                continue
            entries[position] = entry
            rebuild = walk.node_at(entry, own_name, partner.at)
            if rebuild is not None:
                rebuilds[position] = rebuild
        for key in held:
            if not isinstance(key, int):  # beside those of parameters
                rebuild = walk.node({key: held[key]}, below(self.name, "state"))
                if rebuild is not None:
                    rebuilds[key] = lambda key=key, made=rebuild: made()[key]

        def filled() -> dict[Any, Any]:
            return entries | {key: rebuild() for key, rebuild in rebuilds.items()}

        return filled

    def match_groups(self) -> Callable[[], list[dict[str, Any]]]:
        """Match the settings of every group with those saved for its parameters."""
        walk = self.walk
        groups: list[dict[str, Any]] = self.state["param_groups"]
        made: dict[int, Callable[[], dict[str, Any]]] = {}
        filled: list[Callable[[], dict[str, Any]]] = []
        chosen: list[int | None] = []
        for number, group in enumerate(groups):
            source = self.source_of(number, group)
            chosen.append(source)
            settings = settings_of(group)
            if source is None:
                filled.append(lambda settings=settings: settings)
            elif source in made:  # a group that has been split
                filled.append(self.copied(settings, source, made[source]))
            else:
                name = below(self.name, f"param_groups/{number}")
                rebuild = walk.node_at(settings, name, self.saved.group_at(source))
                made[source] = rebuild or (lambda settings=settings: settings)
                filled.append(made[source])
        self.check_schedulers(chosen)

        def together() -> list[dict[str, Any]]:
            own = ({k: g[k] for k in ("params", "param_names") if k in g} for g in groups)
            return [make() | params for make, params in zip(filled, own, strict=True)]

        return together

    def source_of(self, number: int, group: dict[str, Any]) -> int | None:
        """Return the saved group whose settings a group takes; None where nothing tells."""
        walk, saved = self.walk, self.saved
        partners = [p for p in (self.partners[n] for n in group["params"]) if p is not None]
        sources = list(dict.fromkeys(partner.group for partner in partners))
        if not sources:
            both_empty = not group["params"] and number < len(saved.sizes)
            return number if both_empty and saved.sizes[number] == 0 else None
        first = sources[0] if number not in sources else number
        for other in sources:
            ours, theirs = saved.groups[first], saved.groups[other]
            differing = sorted(
                key for key in {*ours, *theirs} if ours.get(key, ABSENT) != theirs.get(key, ABSENT)
            )
            at = saved.group_at(other)
            if not walk.selects_below(at):
                continue
            if differing:
                of_other = next(p for p in partners if p.group == other)
                of_first = next(p for p in partners if p.group == first)
                walk.found.problems.append(
                    f"{at}: group {number} of {self.name} has parameters of groups that were saved "
                    f"with other {', '.join(differing)}: {of_first.name or of_first.at} is of "
                    f"{saved.group_at(first)}, {of_other.name or of_other.at} of {at}. Group the "
                    "parameters as they were, or leave the groups out by select="
                )
            walk.taken.update(walk.index.leaves_of(at) if other != first else ())
        return first

    def copied(
        self, settings: dict[str, Any], source: int, first: Callable[[], dict[str, Any]]
    ) -> Callable[[], dict[str, Any]]:
        """Return what makes settings equal to those of another part of a saved group."""
        at = self.saved.group_at(source)
        selected = [
            str(key)
            for key, component, _ in children(self.walk.index.nodes[at])
            if all(map(self.walk.is_selected, self.walk.index.leaves_of(below(at, component))))
        ]

        def copy_settings() -> dict[str, Any]:
            given = first()
            taken = {k: given[k] for k in selected if k in given and k in settings}
            return settings | copy.deepcopy(taken)

        return copy_settings

    def check_schedulers(self, chosen: list[int | None]) -> None:
        """Note schedulers that hold rates by the positions of groups which are others now."""
        walk = self.walk
        stay = all(source in (None, number) for number, source in enumerate(chosen))
        for name, scheduler in walk.visited.objects.items():
            if getattr(scheduler, "optimizer", None) is not self.optimizer:
                continue
            at = walk.at(name)
            kept = [walk.index.find(below(at, key)) for key in _PER_GROUP]
            lists = [
                [child for _, _, child in children(node)]
                for node in kept
                if node is not ABSENT and tag_of(node) == "list"
            ]
            wrong = [
                rates
                for rates in lists
                if len(rates) != len(chosen)
                or (not stay and any(rate != rates[0] for rate in rates))
            ]
            if wrong and walk.selects_below(at):
                walk.found.problems.append(
                    f"{at}: the scheduler was saved with rates for each group of {self.name} by "
                    "its position, but these are other groups now (of the checkpoint's groups "
                    f"they are {chosen}). Group the parameters as they were, or leave the "
                    "scheduler out of the load"
                )
