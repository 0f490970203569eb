"""The state of a learning-rate schedule for another number of groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dtckpt.errors import LayoutMismatch

_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists with an entry for each group, and the setting of a group that says the same."""


def regrouped(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], *, num_saved: int
) -> dict[str, Any]:
    """Return the saved state of a schedule as that of one over other groups.

    ``groups`` are those of the optimizer, which has been loaded, so that they say their rates.
    LayoutMismatch where saved groups differ in what no group says.

    >>> saved = {"last_epoch": 3, "base_lrs": [1.0, 1.0], "_last_lr": [0.5, 0.5]}
    >>> regrouped(saved, [{"initial_lr": 1.0, "lr": 0.5}], num_saved=2)
    {'last_epoch': 3, 'base_lrs': [1.0], '_last_lr': [0.5]}
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        setting = _OF_GROUPS.get(key)
        if setting and all(setting in group for group in groups):
            found[key] = [group[setting] for group in groups]
        elif isinstance(value, list) and len(cast(list[Any], value)) == num_saved:
            entries = cast(list[Any], value)
            if any(entry != entries[0] for entry in entries):
                raise LayoutMismatch(
                    f"the schedule was saved for {num_saved} groups of parameters, with different "
                    f"{key} ({entries}), and there are {len(groups)} now. Make the same groups"
                )
            found[key] = entries[:1] * len(groups)
        else:
            found[key] = value
    return found
