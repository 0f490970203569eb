"""Whether what a scheduler keeps for each group, by its position, is for the groups of now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..optimizers.named_state import SavedOptimizer
from ..optimizers.param_names import plain_name
from ..state.names import rank_component
from ..state.tree import ABSENT, Node, TreeIndex, children, tag_of
from .walk import Walk

_PER_GROUP = frozenset(
    ["_last_lr", "base_lrs", "base_momentums", "lr_lambdas", "max_lrs", "max_momentums", "min_lrs"]
)
"""What schedulers of torch keep for each group."""
_OF_TIME = frozenset({"_milestones", "milestones"})
"""Lists of numbers that are not of groups, however many there are."""

_RATES = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""What schedulers keep of settings of all groups."""

Lists = list[tuple[str, list[Node]]]


def check_schedulers(
    walk: Walk,
    optimizer: torch.optim.Optimizer,
    name: str,
    saved: SavedOptimizer,
    chosen: Sequence[int | None],
    *,
    are_own: bool,
) -> None:
    """Note schedulers that hold something by the positions of groups which are others now.

    Each group of the optimizer called ``name`` takes the settings of group ``chosen[i]`` of those
    ``saved``; ``are_own`` as in ``is_of_groups``. State dicts of schedulers that stand for
    themselves, or in objects of other kinds, are known by their rates where groups have moved.
    """
    objects = {walk.at(n): getattr(o, "optimizer", None) for n, o in walk.visited.objects.items()}
    known = {at: its for at, its in objects.items() if isinstance(its, torch.optim.Optimizer)}

    def check(at: str) -> None:
        node = walk.index.find(at)
        if node is ABSENT or not walk.selects_below(at):
            return
        of_rank = plain_name(at) != at and plain_name(saved.at) == saved.at
        if not is_of_groups(node, chosen, saved.groups, of_rank=of_rank, are_own=are_own):
            walk.found.problems.append(
                f"{at}: the scheduler was saved with rates for each group of {name} by its "
                "position, but these are other groups now (of the checkpoint's groups they are "
                f"{list(chosen)}). Group the parameters as they were, or leave the scheduler out "
                "of the load"
            )

    def check_state_dicts() -> None:
        own = rank_component(walk.ranks.rank)
        inside = tuple(f"{at}/" for at in known)
        for at in _with_rates(walk.index, saved.groups):
            is_other = "@" in at and any(p[:1] == "@" and p != own for p in at.split("/"))
            if not is_other and not f"{at}/".startswith(inside) and walk.takes_below(at):
                check(at)

    for at, its in known.items():
        if its is optimizer:
            check(at)
    if list(chosen) != list(range(len(saved.groups))):
        walk.at_end.append(check_state_dicts)  # what of them is taken is known only then


def _with_rates(index: TreeIndex, groups: Sequence[Mapping[str, Node]]) -> list[str]:
    """Return the nodes that have the rates of these groups, in this order, as schedulers do."""
    found: set[str] = set()
    for name, node in index.nodes.items():
        above, _, last = name.rpartition("/")
        setting = _RATES.get(last)
        if setting is None or tag_of(node) not in ("list", "tuple"):
            continue
        if [item for _, _, item in children(node)] == [g.get(setting, ABSENT) for g in groups]:
            found.add(above)
    return [at for at in sorted(found) if not at.startswith(tuple(f"{a}/" for a in found))]


def is_of_groups(
    scheduler: Node,
    chosen: Sequence[int | None],
    groups: Sequence[Mapping[str, Node]],
    *,
    of_rank: bool,
    are_own: bool,
) -> bool:
    """Whether the lists of a saved scheduler, and of those within it, fit the groups of now.

    Each group takes the settings of ``groups[chosen[i]]``. The lists are in the order of the saved
    groups, but where a rank kept its scheduler for itself (``of_rank``), or groups of ranks were
    brought together: there they are in the order of the rank's own, which the settings have to
    tell. ``are_own`` says that the saved groups have the parameters of the groups of now.
    """
    lists = list(_lists(scheduler, len(groups)))
    if any(key in _PER_GROUP and len(values) != len(chosen) for key, values in lists):
        return False
    if all(value == values[0] for _, values in lists for value in values):
        return True
    if of_rank or len(groups) != len(chosen):
        stay = are_own and all(source in (None, i) for i, source in enumerate(chosen))
        return _settings_tell(
            lists, [{} if c is None else groups[c] for c in chosen], or_nothing=stay
        )
    return all(
        values[number] == values[number if source is None else source]
        for _, values in lists
        for number, source in enumerate(chosen)
    )


def _lists(node: Node, num_groups: int) -> Iterator[tuple[str, list[Node]]]:
    """Yield the lists that are for each group, at any depth; those of unknown names by length."""
    for key, _, child in children(node):
        if tag_of(child) not in ("list", "tuple"):
            yield from _lists(child, num_groups)
            continue
        items = [item for _, _, item in children(child)]
        numbers = all(isinstance(item, int | float) for item in items)
        if key in _PER_GROUP or (numbers and len(items) == num_groups and key not in _OF_TIME):
            yield str(key), items
        else:
            yield from _lists(child, num_groups)


def _settings_tell(lists: Lists, groups: Sequence[Mapping[str, Node]], *, or_nothing: bool) -> bool:
    """Whether each position has the rate of its group, and no other position that is not alike.

    With ``or_nothing`` it is enough that no rate speaks against it.
    """
    names = {key for key, _ in lists}
    key, setting = ("base_lrs", "initial_lr") if "base_lrs" in names else ("_last_lr", "lr")
    rates = next((values for name, values in lists if name == key), [ABSENT] * len(groups))
    for number, group in enumerate(groups):
        rate = group.get(setting, ABSENT)
        fitting = [other for other, value in enumerate(rates) if value == rate]
        if or_nothing:
            is_told = isinstance(rate, int | float) and key == "base_lrs"
            if is_told and number not in fitting:
                return False
        elif number not in fitting or any(
            values[other] != values[number] for _, values in lists for other in fitting
        ):
            return False
    return True
