"""Short texts for the values of a checkpoint that are not tensors, from their stored form.

Nothing is decoded, so nothing of torch or numpy is needed, and pickles stay closed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, cast

from ....checkpoint.state.tree import children, tag_of
from ....checkpoint.state.values import Node
from .console import printable

MAX_CHARS = 50
_MAX_ITEMS = 6
_NUM_FIRST = 3


def value_text(node: Node, *, is_whole: bool = False) -> str:
    """Return one line of at most ``MAX_CHARS`` printable characters for a value node, or all.

    >>> value_text({"tuple": [0.9, {"float": "nan"}]})
    '(0.9, nan)'
    """
    text = printable(_text(node, is_whole))
    return text if is_whole or len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 3]}..."


def _text(node: Node, is_whole: bool = False) -> str:
    tag = tag_of(node)
    if tag is None:
        return repr(node)
    if tag in ("list", "tuple"):
        return _sequence(node, "[]" if tag == "list" else "()", is_whole)
    if tag in ("dict", "items"):
        return "{}" if not node[tag] else "{...}"
    try:
        return _FORMS[tag](node[tag])
    except (TypeError, ValueError, LookupError):
        return json.dumps(node)  # not of this version: shown as it is


def _sequence(node: Node, brackets: str, is_whole: bool) -> str:
    items = [child for _, _, child in children(node)]
    shown = items if is_whole or len(items) <= _MAX_ITEMS else items[:_NUM_FIRST]
    parts = [_text(item, is_whole) for item in shown]
    if len(shown) < len(items):
        parts.append(f"... {len(items):,} items")
    elif brackets == "()" and len(items) == 1:
        parts.append("")
    return brackets[0] + ", ".join(parts).rstrip(" ") + brackets[1]


def _complex(parts: list[Node]) -> str:
    return f"complex({', '.join(map(_text, parts))})"


def _enum(value: list[str]) -> str:
    return f"{value[0].rpartition('.')[2]}.{value[1]}"


def _num_bytes(text: str) -> str:
    return f"{len(base64.b64decode(text)):,} bytes"


_FORMS: dict[str, Callable[[Any], str]] = {
    "float": cast(Callable[[Any], str], str),
    "complex": _complex,
    "bytes": _num_bytes,
    "numpy": lambda value: f"numpy scalar {value[0]}",
    "dtype": lambda name: f"torch.{name}",
    "device": lambda text: f"device {text!r}",
    "size": lambda sizes: f"torch.Size({sizes})",
    "enum": _enum,
    "datetime": lambda text: f"datetime {text}",
    "date": lambda text: f"date {text}",
    "time": lambda text: f"time {text}",
    "timedelta": lambda told: f"timedelta({', '.join(map(str, told))})",
    "path": lambda told: f"{told[0]}({told[1]!r})",
    "set": lambda nodes: f"set of {len(nodes):,}",
    "frozenset": lambda nodes: f"frozenset of {len(nodes):,}",
    "deque": lambda told: f"deque of {len(told[0]):,}",
    "packed": lambda told: f"{told[2]} of {told[3]:,}, packed",
    "pickle": lambda text: f"pickled, {_num_bytes(text)}",
}
