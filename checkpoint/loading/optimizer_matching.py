"""Matching an optimizer with its saved state, parameter by parameter and group by group.

Parameters are found by their names, see ``param_pairing``. A group takes the settings that were
saved for its parameters, in whichever groups these were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtckpt.errors import CheckpointError

from ..files.stored_tensor import StoredTensor
from ..optimizers.fresh_state import FreshState, flat_state, load_optimizer, wrong_shapes
from ..optimizers.named_state import (
    SavedOptimizer,
    SavedParam,
    is_numbered,
    named_state,
    read_saved,
    settings_of,
)
from ..optimizers.own_entries import (
    boxes_of,
    is_own_entry,
    local_of,
    new_part,
    new_subclass_part,
    saved_parts,
)
from ..optimizers.pairing import LiveParam, Pairing, pair
from ..optimizers.param_names import ParamLabel, params_of, plain_name
from ..optimizers.spread import owned_part, unknown_parts
from ..optimizers.wrappers import inner_name
from ..state.names import key_component
from ..state.subclass_node import SUBCLASS
from ..state.tree import ABSENT, TENSORS, below, children, tag_of, unflatten
from ..tensors.materialising import memory_key
from .match import Rebuild
from .scheduler_matching import check_schedulers
from .walk import Walk


def match_optimizer(
    walk: Walk, optimizer: torch.optim.Optimizer, name: str, state: Any
) -> Callable[[Any], object] | None:
    """Match an optimizer; return what hands it its state, or None where nothing is for it."""
    before = len(walk.found.destinations), len(walk.found.values)
    problem = unknown_parts(optimizer, walk.visited.modules)
    if problem:
        walk.found.problems.append(f"{name}: {problem}")
        return None
    at = walk.at(below(name, "param_groups")).removesuffix("param_groups").rstrip("/")
    saved = read_saved(walk.index, at) if is_numbered(state) else None
    if saved is None:
        labels = walk.names.labels(optimizer)
        rebuild = walk.node(named_state(state, labels) or state, name)
        if rebuild is None or (len(walk.found.destinations), len(walk.found.values)) == before:
            return None
        if is_numbered(state):  # by names now, which its load_state_dict does not understand
            walk.found.problems.append(
                f"{name}: parts of its state were saved, but not state and param_groups of an "
                f"optimizer below {at or 'the root'}, by which its parameters are known; "
                "rename= and select= can move and take an optimizer as a whole"
            )
        return lambda replaced: load_optimizer(optimizer, rebuild(), replaced)
    match = _OptimizerMatch(walk, optimizer, name, state, saved)
    filled = match.run()
    if (len(walk.found.destinations), len(walk.found.values)) == before:
        return None  # nothing to hand over, and nothing may change
    return lambda replaced: load_optimizer(optimizer, filled(), replaced)


@dataclass(slots=True)
class _OptimizerMatch:
    """One optimizer whose state dict and saved state both have the usual form."""

    walk: Walk
    optimizer: torch.optim.Optimizer
    name: str
    state: dict[Any, Any]
    saved: SavedOptimizer
    labels: list[ParamLabel] = field(init=False)
    fresh: FreshState = field(init=False)
    partners: tuple[SavedParam | None, ...] = ()
    beside: tuple[StoredTensor | None, ...] = ()
    """The parameters in the checkpoint, where they are known."""

    def __post_init__(self) -> None:
        walk = self.walk
        self.labels = walk.names.labels(self.optimizer)
        allow_pickle = walk.options.allow_pickle
        self.fresh = FreshState(walk.index, walk.stored, walk.is_selected, allow_pickle)

    def run(self) -> Callable[[], dict[Any, Any]]:
        """Return what makes the state dict to be loaded, by the optimizer's own numbers."""
        walk, found = self.walk, self.walk.found
        sizes = [len(group["params"]) for group in self.state["param_groups"]]
        pairing = self.paired(sizes)
        if None in pairing.partners or pairing.by_position or pairing.problems:
            self.labels = walk.names.labels(self.optimizer, all_names=True)
            pairing = self.paired(sizes)
        self.partners, self.beside = pairing.partners, pairing.beside
        if walk.selects_below(self.saved.at):
            found.problems += pairing.problems
            found.by_position += [self.partner_at(n) for n in sorted(pairing.by_position)]
            self.check_shapes(pairing)
            self.check_flat_state()
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

    def paired(self, sizes: Sequence[int]) -> Pairing:
        """Return which saved parameter each parameter is, by the names that are known of it."""
        params = list(map(self.live_param, self.labels))
        return pair(self.name, params, sizes, self.saved, self.walk.tables)

    def live_param(self, label: ParamLabel) -> LiveParam:
        """Return the names of a parameter here and in the checkpoint."""
        renamed = tuple(map(self.walk.at, label.names))
        moved = [pair for pair in zip(label.names, renamed, strict=True) if pair[0] != pair[1]]
        is_same = all(inner_name(name) == inner_name(at) for name, at in moved)
        return LiveParam(
            names=tuple(map(plain_name, renamed)),
            unrenamed=tuple(plain_name(name) for name, _ in moved),
            given=label.given if is_same else None,
        )

    def own_name(self, position: int) -> str:
        """Return the name of the state of a parameter in the state that is loaded."""
        text = self.labels[position].text
        return f"{below(self.name, 'state')}/{f'#{position}' if text is None else text}"

    def partner_at(self, position: int) -> str:
        """Return the name of the saved state of a parameter that has a partner."""
        partner = self.partners[position]
        return "" if partner is None else partner.at

    def check_shapes(self, pairing: Pairing) -> None:
        """Note saved state that cannot be of its parameter, where this is not known to fit."""
        walk, params = self.walk, params_of(self.optimizer)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            return
        for position, partner in enumerate(self.partners):
            param, stored = params[position], pairing.beside[position]
            known = stored is not None and stored.shape == tuple(param.shape)
            if partner is None or known or not walk.selects_below(partner.at):
                continue
            walk.found.problems += wrong_shapes(
                walk.index,
                walk.stored,
                partner.at,
                param,
                f"parameter {position} of {self.name}",
                in_doubt=stored is not None or position in pairing.by_position,
            )

    def check_flat_state(self) -> None:
        """Note an optimizer with vectors over all parameters, where these are not the same ones."""
        is_flat = isinstance(self.optimizer, torch.optim.LBFGS)
        if not is_flat or not self.walk.selects_below(below(self.saved.at, "state")):
            return
        index, params = self.walk.index, params_of(self.optimizer)
        partners = [partner for partner in self.partners if partner is not None]
        held = [flat_state(index, self.walk.stored, p.at) for p in partners]
        if not any(size is not None for size in held):
            return
        first = partners[0].position
        in_order = [p.position for p in partners] == list(range(first, first + len(params)))
        total = sum(param.numel() for param in params)
        if not in_order or held[0] != total or any(size is not None for size in held[1:]):
            saved = [param.name or f"#{param.position}" for param in self.saved.params]
            self.walk.found.problems.append(
                f"{self.name}: {type(self.optimizer).__name__} keeps vectors over all of its "
                "parameters, which have to be the same ones in the same order: saved were "
                f"{saved[:5]}, wanted are {[label.text for label in self.labels[:5]]}. Construct "
                "the optimizer as it was"
            )

    def match_entries(self) -> Callable[[], dict[Any, Any]]:
        """Match the state of every parameter, and what state there is beside."""
        walk = self.walk
        held: dict[Any, Any] = self.state["state"]
        owned = owned_part(self.optimizer)
        own = None if owned is None else set(map(id, params_of(owned)))
        entries: dict[Any, Any] = dict(held)
        rebuilds: dict[Any, Rebuild] = {}
        unknown: dict[int, torch.Tensor] = {}
        """Parameters with state that the saved optimizer did not have."""
        for position, param in enumerate(params_of(self.optimizer)):
            partner, own_name = self.partners[position], self.own_name(position)
            if partner is None:
                at = walk.at(own_name)
                if walk.is_selected(at):
                    walk.found.missing[at] = own_name
                    if held.get(position):
                        unknown[position] = param
                continue
            if walk.cannot_reach(partner.at) or (own is not None and id(param) not in own):
                continue
            existing = held.get(position) or {}
            if is_own_entry(walk.index, partner.at):
                entries.pop(position, None)
                made = self.own_entry(param, partner.at, own_name)
                if made is not None:
                    rebuilds[position] = made
                elif existing:
                    walk.found.cleared.append(own_name)
                continue
            entry = self.fresh.entry(existing, partner.at, param, self.beside[position])
            if existing and not entry:
                walk.found.cleared.append(own_name)
            if not entry:
                entries.pop(position, None)
                if walk.is_selected(partner.at) and walk.index.find(partner.at) is not ABSENT:
                    entries[position] = {}  # as it was: optimizers look up what they never fill
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
            for position in self.loaded_among(unknown):
                del entries[position]  # it is of other elements than the parameter has now
                walk.found.cleared.append(self.own_name(position))
            return entries | {key: rebuild() for key, rebuild in rebuilds.items()}

        return filled

    def own_entry(self, param: torch.Tensor, at: str, name: str) -> Rebuild | None:
        """Match state that was stored apart for each part of its parameter; None for no state."""
        walk, found = self.walk, self.walk.found
        parts = saved_parts(walk.index, at)
        walk.taken.update(walk.index.leaves_of(at))
        local = local_of(param)
        boxes, shape = boxes_of(local), local.shape
        own = next((p for p in parts if (p.shape, [*p.boxes]) == (shape, boxes)), None)
        if own is None:
            if any(not part.is_absent and part.overlaps(boxes) for part in parts):
                told = ", ".join(" and ".join(part.boxes) for part in parts)
                found.problems.append(
                    f"{at}: ranks had other state of this parameter, or none (an expert without "
                    f"tokens), so it was saved for each of the parts {told} and goes back to "
                    f"these; here is {' and '.join(boxes)}. Load it with the parts of the save, "
                    "whatever the numbers of the ranks are, and save it there after a step in "
                    "which all of it had gradients as often"
                )
            return None
        if own.is_absent:
            return None
        entry: dict[Any, Callable[[], Any]] = {}
        for key, component, node in children(walk.index.nodes[own.at]):
            leaf = below(own.at, component)
            if tag_of(node) == SUBCLASS:
                self.own_subclass(param, node, leaf, entry, key, is_sharded=key in own.sharded)
                continue
            if tag_of(node) not in TENSORS:
                value = unflatten(node, lambda n, _: n, allow_pickle=walk.options.allow_pickle)
                found.values += walk.index.leaves_of(leaf)
                entry[key] = lambda value=value: value
                continue
            stored = walk.stored[node[tag_of(node)]]
            made, target = new_part(param, stored, is_sharded=key in own.sharded)
            found.destinations[stored.name] = target
            found.own.add(stored.name)
            entry[key] = lambda made=made: made
        return lambda: {key: value() for key, value in entry.items()}

    def own_subclass(
        self,
        param: torch.Tensor,
        node: Any,
        leaf: str,
        entry: dict[Any, Callable[[], Any]],
        key: Any,
        *,
        is_sharded: bool,
    ) -> None:
        """Make room for a tensor of the state of a part that consists of others."""
        walk, found = self.walk, self.walk.found
        try:
            made = new_subclass_part(
                param,
                node,
                leaf,
                walk.stored,
                is_sharded=is_sharded,
                allow_pickle=walk.options.allow_pickle,
            )
        except CheckpointError as error:
            found.problems.append(str(error))
            return
        for stored, tensor in made.plain():
            found.destinations[stored] = tensor
            found.own.add(stored)
        entry[key] = made.make

    def loaded_among(self, params: Mapping[int, torch.Tensor]) -> list[int]:
        """Return the positions of parameters that this load fills."""
        if not params:
            return []
        filled = {
            memory_key(tensor)
            for tensor in self.walk.found.destinations.values()
            if isinstance(tensor, torch.Tensor)
        }
        return [position for position, param in params.items() if memory_key(param) in filled]

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
                made[source] = self.settings(settings, number, source)
                filled.append(made[source])
        are_own = [p.group for p in self.partners if p is not None] == [
            param.group for param in self.saved.params
        ]
        check_schedulers(walk, self.optimizer, self.name, self.saved, chosen, are_own=are_own)

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
            if group["params"] or len(self.state["param_groups"]) != len(saved.sizes):
                return None
            return number  # an empty group, as on a stage that has no such parameter
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
                    "parameters as they were; settings may be changed after the load"
                )
            walk.taken.update(walk.index.leaves_of(at) if other != first else ())
        return first

    def settings(
        self, settings: dict[str, Any], number: int, source: int
    ) -> Callable[[], dict[str, Any]]:
        """Match the settings of a group: those that were saved, and where there are none its own.

        A fresh optimizer has not yet what steps put into its groups, such as their number, and a
        later release has settings that an earlier one had not.
        """
        walk, name = self.walk, below(self.name, f"param_groups/{number}")
        rebuilds: dict[str, Rebuild] = {}
        outside, walk.takes_form = walk.takes_form, True
        for key in self.saved.groups[source]:
            component = key_component(key)
            at = below(self.saved.group_at(source), component)
            if walk.selects_below(at):
                rebuild = walk.node_at(settings.get(key), below(name, component), at)
                if rebuild is not None:
                    rebuilds[key] = rebuild
        walk.takes_form = outside
        return lambda: settings | {key: rebuild() for key, rebuild in rebuilds.items()}

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
            taken = {key: given[key] for key in selected if key in given}
            return settings | copy.deepcopy(taken)

        return copy_settings
