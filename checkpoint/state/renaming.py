"""From names in the state that is loaded to names in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtckpt.errors import LayoutMismatch

from .patterns import has_places, pattern

Rename = Mapping[str, str] | Callable[[str], str]
"""From names in the state to names in the checkpoint."""


class Renaming:
    """Finds the name in the checkpoint for every name in the state.

    A mapping renames the name that is its key and everything below; the longest key counts. Keys
    with places to be filled in (``patterns``) go before, the first that fits a whole name. The
    empty name is the root: ``{"": "model"}`` loads a state from what was saved under ``model``,
    ``{"model": ""}`` loads ``model`` from a checkpoint of nothing else. A function is given every
    name, those of containers too, and returns the one in the checkpoint.

    >>> renaming = Renaming({"model": "ema", "model/head": "head"})
    >>> renaming("model/w"), renaming("model/head/w"), renaming("step"), renaming.idle()
    ('ema/w', 'head/w', 'step', [])
    >>> Renaming({"model/h.{i}.{rest*}": "net/layers.{i}.{rest*}"})("model/h.3.w")
    'net/layers.3.w'
    """

    def __init__(self, rename: Rename) -> None:
        self._function: Callable[[str], object] | None = rename if callable(rename) else None
        self._mapping: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        self._used: set[str] = set()
        if not callable(rename):
            for old, new in rename.items():
                if has_places(old):
                    self._add_pattern(old, new)
                elif self._mapping.setdefault(old.rstrip("/"), new.rstrip("/")) != new.rstrip("/"):
                    raise LayoutMismatch(f"rename= gives two names for {old.rstrip('/')!r}")

    def _add_pattern(self, old: str, new: str) -> None:
        unknown = pattern(new).captures - pattern(old).captures if new else None
        if unknown:
            told = ", ".join(sorted(unknown))
            raise LayoutMismatch(f"rename= {old!r}: {new!r} has {told}, which the first has not")
        self._patterns[old] = new

    def _by_pattern(self, name: str) -> str | None:
        for old, new in self._patterns.items():
            for told in (name, f"{name}/"):  # {rest*} of a container is nothing
                captured = pattern(old).match(told)
                if captured is not None:
                    self._used.add(old)
                    return pattern(new).fill(captured).rstrip("/") if new else ""
        return None

    def __call__(self, name: str) -> str:
        if self._function is not None:
            renamed = self._function(name)
            if not isinstance(renamed, str):
                raise LayoutMismatch(f"rename({name!r}) returned {renamed!r}, expected a str")
            return renamed
        if (renamed := self._by_pattern(name)) is not None:
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
        return [key for key in (*self._mapping, *self._patterns) if key not in self._used]
