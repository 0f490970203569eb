"""What is refused where state and checkpoint differ, with what the user may want instead."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.errors import LayoutMismatch

from ..files.manifest import Manifest
from ..formats.beside import not_there
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


def refuse_left_out(found: Match, manifest: Manifest, where: str) -> None:
    """Raise LayoutMismatch if the state has what cannot be read from a file of another program.

    Whatever ``strict`` says: it is there, and the program would go on with another value.
    """
    told = {at: why for at in found.missing if (why := not_there(manifest, at))}
    if told:
        why = next(iter(told.values()))
        raise LayoutMismatch(
            f"{where}: {some_names(list(told))} cannot be loaded, and nothing was loaded ({why}). "
            "Take it out of the state, or load it with torch and save it anew in a form that "
            "dtckpt holds"
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
    remedies = _remedies(found, unexpected)
    if any(at.rpartition("/")[2] == own for at in found.missing):
        remedies.insert(
            0,
            "A rank that is new has nothing to load into its PerRank: PerRank(value, "
            'new_rank="keep") lets it keep its own value, and a value that is the same on all '
            "ranks is better saved as PerCoordinate(value, axes=()), which every rank gets back",
        )
    raise LayoutMismatch(
        f"{where}: state and checkpoint differ and nothing was loaded. Missing in the "
        f"checkpoint: {some_names(missing)}. In the checkpoint but not asked for: "
        f"{some_names(unexpected)}. {'. '.join(remedies)}"
    )


def _remedies(found: Match, unexpected: Sequence[str]) -> list[str]:
    """Return what a user may want who has other leaves than the checkpoint.

    What is not loaded is lost to a program that goes on: it is said of each remedy.
    """
    if found.missing and unexpected:
        return [
            "If they are there under other names, rename= says so",
            "If not, give a state that has what was saved, too: select= and strict=False load a "
            "part, and go on without the rest",
        ]
    if found.missing:
        return [
            "If they are there under other names, rename= says so",
            "If they are new since the save, strict=False loads all that was saved, leaves them "
            "as they are, and lists them in the report as missing; parameters that were tied at "
            "the save have to be tied before the optimizer is made",
        ]
    part = covering([*found.destinations, *found.values], unexpected)
    more = ", ..." if len(part) > _MOST_PATTERNS else ""
    patterns = f"[{', '.join(map(repr, part[:_MOST_PATTERNS]))}{more}]"
    return [
        "To go on from all that was saved, have it in the state, too",
        f"To load all but that, name the part, select={patterns}: all of that part is then "
        "loaded, or nothing",
    ]
