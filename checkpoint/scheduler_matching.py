"""Whether what a scheduler keeps for each group, by its position, is for the groups of now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .tree import Node, children, tag_of
from .tree_index import ABSENT

_PER_GROUP = frozenset(
    {
        "_last_lr",
        "base_lrs",
        "base_momentums",
        "lr_lambdas",
        "max_lrs",
        "max_momentums",
        "min_lrs",
    }
)
"""What schedulers of torch keep for each group."""
_OF_TIME = frozenset({"_milestones", "milestones"})
"""Lists of numbers that are not of groups, however many there are."""

Lists = list[tuple[str, list[Node]]]


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
