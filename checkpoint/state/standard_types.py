"""Values of the standard library's types: dates and times, paths, sets and deques.

They are leaves. What a set or deque holds are plain values, lists and tuples: nothing in it has a
name of its own, and so no tensor lies in it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast

Encode = Callable[[object], Any]
"""Returns the node of a plain value."""
Decode = Callable[[Any], Any]

_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
_PATHS: dict[str, type[PurePath]] = {
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "PosixPath": PosixPath,
    "WindowsPath": WindowsPath,
}


def standard_node(value: object, encode: Encode) -> Any:
    """Return the node of a value of one of these types, and None for others.

    ValueError, with a remedy, for what its form does not hold.
    """
    kind = type(value)
    if kind is datetime or kind is time:
        moment = cast("datetime | time", value)
        _check_zone(moment.tzinfo)
        if moment.fold:
            raise ValueError("fold=1 has no form; convert it to UTC first")
        return {kind.__name__: moment.isoformat()}
    if kind is date:
        return {"date": cast(date, value).isoformat()}
    if kind is timedelta:
        delta = cast(timedelta, value)
        return {"timedelta": [delta.days, delta.seconds, delta.microseconds]}
    if kind in _PATHS.values():
        return {"path": [kind.__name__, str(value)]}
    if kind is set or kind is frozenset:
        nodes = [_inner(item, encode) for item in cast(Iterable[Any], value)]
        # Sets of equal values have other orders in other processes.
        return {kind.__name__: sorted(nodes, key=json.dumps)}
    if kind is deque:
        items = cast("deque[Any]", value)
        return {"deque": [[_inner(item, encode) for item in items], items.maxlen]}
    return None


def _check_zone(zone: tzinfo | None) -> None:
    if zone is None:
        return
    if type(zone) is timezone and str(zone) == str(timezone(zone.utcoffset(None))):
        return  # a plain offset; one with a name of its own has another text
    raise ValueError(
        f"the time zone {zone} has rules or a name that no offset holds; convert it first: "
        "value.astimezone(datetime.timezone.utc)"
    )


def _inner(value: Any, encode: Encode) -> Any:
    tag = _SEQUENCES.get(type(value))
    return {tag: [_inner(item, encode) for item in value]} if tag else encode(value)


def _of_inner(node: Any, decode: Decode) -> Any:
    if isinstance(node, dict):
        for kind, tag in _SEQUENCES.items():
            fields = cast(dict[str, Any], node)
            if tag in fields and len(fields) == 1:
                return kind(_of_inner(item, decode) for item in fields[tag])
    return decode(node)


def _path(told: list[str]) -> PurePath:
    name, text = told
    kind = _PATHS[name]
    if issubclass(kind, Path) and not isinstance(Path(), kind):  # of another system
        kind = PurePosixPath if kind is PosixPath else PureWindowsPath
    return kind(text)


def standard_value(tag: str, told: Any, decode: Decode) -> Any:
    """Return the value of a node; any Exception where it is malformed."""
    if tag in ("set", "frozenset"):
        items = [_of_inner(node, decode) for node in told]
        made = set(items) if tag == "set" else frozenset(items)
        if len(made) != len(items):
            raise ValueError("a set has an item twice")
        return made
    if tag == "deque":
        nodes, most = told
        return deque([_of_inner(node, decode) for node in nodes], most)
    if tag == "timedelta":
        days, seconds, microseconds = told
        return timedelta(days=days, seconds=seconds, microseconds=microseconds)
    if tag == "path":
        return _path(told)
    kinds: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
    return kinds[tag].fromisoformat(told)


STANDARD_TAGS = ("datetime", "date", "time", "timedelta", "path", "set", "frozenset", "deque")
