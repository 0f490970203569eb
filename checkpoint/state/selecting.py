"""Which leaves of a checkpoint a load is about."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

from dtckpt.errors import LayoutMismatch

_WILDCARD = re.compile(r"[*?\[]")
_MAX_HINT_NAMES = 20_000
"""Names among which near ones are sought."""


class Selection:
    """The leaves whose name matches one of some patterns, and all leaves below such names.

    ``*`` stands for any characters, ``/`` included, ``?`` for one, ``[ab]`` for one of these (so
    ``[*]`` is a star in a name). A pattern without these is the name of a leaf or of a part of the
    state.

    >>> chosen = Selection(["model/*.bias", "optimizer"])
    >>> [name in chosen for name in ("model/a.bias", "optimizer/state/w/step", "model/a.weight")]
    [True, True, False]
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        stripped = [pattern.rstrip("/") for pattern in patterns]
        self._tests = [re.compile(f"{translate(p)}|{translate(p + '/*')}") for p in stripped]
        self._starts = [_WILDCARD.split(f"{p}/", maxsplit=1)[0] for p in stripped]

    def __contains__(self, name: str) -> bool:
        return any(test.match(name) for test in self._tests)

    def may_reach(self, name: str) -> bool:
        """Whether leaves at or below ``name`` can be selected; False only if none can."""
        below = f"{name}/" if name else ""
        return any(below.startswith(start) or start.startswith(below) for start in self._starts)

    def selects_within(self, leaf: str) -> bool:
        """Whether some pattern may select parts of a leaf, and not all of it."""
        return leaf not in self and self.may_reach(leaf)

    def check(self, names: Sequence[str], where: str) -> None:
        """Raise LayoutMismatch for patterns that select none of ``names``, which are all leaves."""
        idle = [
            pattern
            for pattern, test in zip(self.patterns, self._tests, strict=True)
            if not any(map(test.match, names))
        ]
        if idle or not self.patterns:
            hints = "".join(near_names(pattern, names) for pattern in idle)
            told = ", ".join(map(repr, idle)) or "an empty list"
            raise LayoutMismatch(f"{where}: select={told} selects nothing{hints}")


def selection_of(select: str | Sequence[str] | None) -> Selection | None:
    """Return the selection that an argument means; None selects everything."""
    if select is None:
        return None
    return Selection([select] if isinstance(select, str) else list(select))


def near_names(wanted: str, names: Sequence[str], *, with_parts: bool = True) -> str:
    """Return a hint at names, of leaves or of parts of the state, that look like ``wanted``."""
    few = names[:_MAX_HINT_NAMES]
    known = dict.fromkeys(_with_parents(few) if with_parts else few)
    near = difflib.get_close_matches(wanted.rstrip("/*"), known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _with_parents(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        yield name
        while "/" in name:
            name = name.rpartition("/")[0]
            yield name
