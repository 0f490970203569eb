"""Modules into which the tensors of a checkpoint are summed up, by the parts of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SEPARATORS = re.compile(r"[/.]")
_NUMBER = re.compile(r"#?\d+")


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors whose names begin alike, up to ``end``."""

    name: str
    end: int
    tensors: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The name without numbers: layers of one kind have the same."""
        return "/".join(_NUMBER.sub("#", part) for part in _SEPARATORS.split(self.name))

    def inner(self) -> list[_Group]:
        """Return the groups one level down; this one alone if there is none below it."""
        found: dict[tuple[str, int], list[str]] = {}
        for tensor in self.tensors:
            match = _SEPARATORS.search(tensor, self.end + 1)
            end = match.start() if match else len(tensor)
            found.setdefault((tensor[:end], end), []).append(tensor)
        return [_Group(name, end, tuple(tensors)) for (name, end), tensors in found.items()]

    @property
    def is_tensor(self) -> bool:
        """Whether there is nothing below it."""
        return self.end >= max(map(len, self.tensors))


def modules_of(num_bytes: Mapping[str, int], most: int) -> dict[str, str]:
    """Return the module of every tensor, given with its bytes: of ``most`` modules at most.

    Names are cut at ``/`` and at dots. The largest modules are taken apart first, and those that
    differ by numbers alone, as layers do, together or not at all.

    >>> modules_of({"m.0.a": 4, "m.0.b": 4, "m.1.a": 4, "head": 1}, 3)
    {'m.0.a': 'm.0', 'm.0.b': 'm.0', 'm.1.a': 'm.1', 'head': 'head'}
    """
    if not num_bytes:
        return {}
    groups = {"": [_Group("", -1, tuple(num_bytes))]}
    whole: list[_Group] = []
    while groups:
        kind = max(
            groups, key=lambda one: sum(num_bytes[t] for g in groups[one] for t in g.tensors)
        )
        alike = groups.pop(kind)
        inner = [below for group in alike for below in group.inner()]
        rest = len(whole) + sum(map(len, groups.values()))
        if rest + len(inner) > most:
            whole += alike
            continue
        for group in inner:
            if group.is_tensor:
                whole.append(group)
            else:
                groups.setdefault(group.kind, []).append(group)
    found = {tensor: group.name for group in whole for tensor in group.tensors}
    return {tensor: found[tensor] for tensor in num_bytes}
