"""What a reshard would mean for its rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ....checkpoint import Placed, Rule


def unused(placed: Sequence[Placed], rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules that place no tensor."""
    used = {item.rule for item in placed}
    return [rule for rule in rules if rule not in used]
