"""From names in the state that is loaded to names in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtckpt.errors import LayoutMismatch

Rename = Mapping[str, str] | Callable[[str], str]
"""From names in the state to names in the checkpoint."""


class Renaming:
    """Finds the name in the checkpoint for every name in the state.

    A mapping renames the name that is its key and everything below; the longest key counts. The
    empty name is the root: ``{"": "model"}`` loads a state from what was saved under ``model``,
    ``{"model": ""}`` loads ``model`` from a checkpoint of nothing else. A function is given every
    name, those of containers too, and returns the one in the checkpoint.

    >>> renaming = Renaming({"model": "ema", "model/head": "head"})
    >>> renaming("model/w"), renaming("model/head/w"), renaming("step"), renaming.idle()
    ('ema/w', 'head/w', 'step', [])
    """

    def __init__(self, rename: Rename) -> None:
        self._function: Callable[[str], object] | None = rename if callable(rename) else None
        self._mapping: dict[str, str] = {}
        self._used: set[str] = set()
        if not callable(rename):
            for old, new in rename.items():
                if self._mapping.setdefault(old.rstrip("/"), new.rstrip("/")) != new.rstrip("/"):
                    raise LayoutMismatch(f"rename= gives two names for {old.rstrip('/')!r}")

    def __call__(self, name: str) -> str:
        if self._function is not None:
            renamed = self._function(name)
            if not isinstance(renamed, str):
                raise LayoutMismatch(f"rename({name!r}) returned {renamed!r}, expected a str")
            return renamed
        prefix = name
        while prefix not in self._mapping:
            if not prefix:
                return name
            prefix = prefix.rpartition("/")[0]
        self._used.add(prefix)
        rest = name[len(prefix) :].lstrip("/")
        new = self._mapping[prefix]
        return f"{new}/{rest}" if new and rest else new or rest

    def idle(self) -> list[str]:
        """Return the keys of the mapping that were no name, or part of one, so far."""
        return [key for key in self._mapping if key not in self._used]
