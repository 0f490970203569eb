"""Names with places to be filled in: ``layers.{layer}.{rest*}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtckpt.errors import LayoutMismatch

from ...dtensor.comm.caches import remembered

_CAPTURE = re.compile(r"\{([a-zA-Z_][a-zA-Z_0-9]*)(\*?)\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name in which ``{layer}`` stands for any characters but ``.`` and ``/``.

    ``{rest*}`` stands for any characters, none included. What one stands for is the same wherever
    its name stands, in the pattern and in what is made of it.

    >>> Pattern("model.{rest*}").match("model.layers.0.weight")
    {'rest': 'layers.0.weight'}
    >>> Pattern("layers.{layer}.w").match("layers.0.q.w") is None
    True
    >>> Pattern("h.{layer}.attn").fill({"layer": "3"})
    'h.3.attn'
    """

    text: str
    captures: frozenset[str] = field(init=False, compare=False, repr=False)
    """Names of what is captured, with their star."""
    _expression: re.Pattern[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.text or "[" in self.text:
            raise LayoutMismatch(f"{self.text!r} is no pattern of a name of a tensor")
        expression, at = "", 0
        seen: set[str] = set()
        for found in _CAPTURE.finditer(self.text):
            name, star = found.groups()
            expression += re.escape(self.text[at : found.start()])
            kind = ".*" if star else "[^./]+"
            expression += f"(?P={name})" if name in seen else f"(?P<{name}>{kind})"
            seen.add(name)
            at = found.end()
        expression += re.escape(self.text[at:])
        captures = frozenset("".join(found) for found in _CAPTURE.findall(self.text))
        object.__setattr__(self, "captures", captures)
        object.__setattr__(self, "_expression", re.compile(expression, re.DOTALL))

    def match(self, name: str) -> dict[str, str] | None:
        """Return what is captured of a whole name; None where it does not fit."""
        found = self._expression.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, captured: Mapping[str, str]) -> str:
        """Return the name with everything filled in."""
        return _CAPTURE.sub(lambda found: captured[found[1]], self.text)


def has_places(text: str) -> bool:
    """Whether a name has places to be filled in."""
    return _CAPTURE.search(text) is not None


@remembered(1024)
def pattern(text: str) -> Pattern:
    """Return the pattern of a text; LayoutMismatch where it is none."""
    return Pattern(text)
