"""What is refused where state and checkpoint differ, with what the user may want instead."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.errors import LayoutMismatch

from ..ranks.text import covering, some_names
from ..state.names import rank_component
from .match import Match

_MOST_PATTERNS = 4


def refuse_idle(idle: Sequence[str], where: str) -> None:
    """Raise LayoutMismatch if keys of ``rename`` are no name on any rank."""
    if idle:
        raise LayoutMismatch(
            f"{where}: rename= has the keys {some_names(idle)}, which are no names in the state, "
            "or beginnings of names up to a /, on any rank; nothing was loaded"
        )


def refuse_differences(found: Match, unexpected: Sequence[str], rank: int, where: str) -> None:
    """Raise LayoutMismatch if the checkpoint lacks something, or has what no rank asked for.

    ``unexpected`` is the latter; ``where`` is the checkpoint's URL.
    """
    if not found.missing and not unexpected:
        return
    own = rank_component(rank)
    missing = [
        at if at == name else f"{at} ({name} in the state)" for at, name in found.missing.items()
    ]
    new_rank = (
        "A rank that is new has nothing to load into its PerRank: PerRank(value, "
        'new_rank="keep") lets it keep its own value. '
        if any(at.rpartition("/")[2] == own for at in found.missing)
        else ""
    )
    raise LayoutMismatch(
        f"{where}: state and checkpoint differ and nothing was loaded. Missing in the "
        f"checkpoint: {some_names(missing)}. In the checkpoint but not asked for: "
        f"{some_names(unexpected)}. {new_rank}{_remedy(found, unexpected)}"
    )


def _remedy(found: Match, unexpected: Sequence[str]) -> str:
    """Return what a user may want who has other leaves than the checkpoint."""
    if not found.missing:
        part = covering([*found.destinations, *found.values], unexpected)
        more = ", ..." if len(part) > _MOST_PATTERNS else ""
        patterns = f"[{', '.join(map(repr, part[:_MOST_PATTERNS]))}{more}]"
        return (
            f"To load a part of the checkpoint name it, select={patterns}: all of that part is "
            "then loaded, or nothing"
        )
    return (
        "If they are there under other names, rename= says so. To load a part of the "
        "checkpoint name it by select=; strict=False loads what both have, and leaves all "
        "else in the state as it was"
    )
