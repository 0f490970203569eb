"""Checkpoints changed on purpose, with every digest right again, as whoever means harm would."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from dtckpt.checkpoint.files.blocks import digest
from dtckpt.storage import Store

Objects = dict[str, bytes]

_PREFIX = b'{"digest": "'
_END = len(_PREFIX) + 32

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 4096, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1),
    *(1 << 63, 1 << 64, 10**30, -(10**30), 0.5, 1e308, "", "a", "0", "-1", "[0:1]", "[0:1,0:1]"),
    *("S(0)", "S(1)", "S(0)@1", "R", "P(sum)", "Ragged(0:1,2)", "F32", "F4", "U8", "x" * 1000),
    *("../../x", "a/b", "\0", "\\", "\ud800", "\U0001f600", "__metadata__", "__dtckpt_blocks__"),
    *([], {}, [0], [[]], {"tensor": "w"}, {"list": []}, {"pickle": "gASVAA=="}, [1, 2, 3, 4]),
    *([0] * 70, [1] * 70, {"numpy": ["<f8", ""]}, {"enum": ["a", "b"]}, {"dict": {"": None}}),
)
"""What may stand in place of a value."""


def objects_of(store: Store) -> Objects:
    """Every object of a store."""
    return {info.name: store.read(info.name) for info in store.list()}


def sealed(text: bytes) -> bytes:
    """A manifest's text, of which the first field is a digest, with the digest that it has."""
    blank = _PREFIX + b"0" * 32 + text[_END:]
    return _PREFIX + digest(blank).hex().encode() + blank[_END:]


def manifest_of(objects: Objects, at: str = "") -> dict[str, Any]:
    """The parsed manifest of a checkpoint; ``at`` is its directory with a slash."""
    return json.loads(objects[f"{at}manifest.json"])


def with_manifest(objects: Objects, manifest: Any, at: str = "") -> Objects:
    """The objects with another manifest."""
    fields = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps({"digest": "0" * 32} | fields).encode()
    return objects | {f"{at}manifest.json": sealed(text)}


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The parsed header of a data file, and what follows it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_file(
    objects: Objects, number: int, header: Any, body: bytes, at: str = "", *, fit: bool = True
) -> Objects:
    """The objects with another data file, and a manifest that tells its sizes and digests.

    Without ``fit`` the length of the data region stays what it was.
    """
    manifest = manifest_of(objects, at)
    record = manifest["files"][number]
    name = f"{at}data/{manifest['save_id']}/{record['rank']:05d}.safetensors"
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    text += b" " * (-(8 + len(text)) % 4096)
    head = len(text).to_bytes(8, "little") + text
    if fit:
        record["data_bytes"] = _data_bytes(header, len(body))
    table = body[record["data_bytes"] :]
    record |= {"size": len(head) + len(body), "header_bytes": len(head)}
    record |= {"header": digest(head).hex(), "blocks": digest(table).hex()}
    return with_manifest(objects | {name: head + body}, manifest, at)


def _data_bytes(header: Any, most: int) -> int:
    try:
        start = header["__dtckpt_blocks__"]["data_offsets"][0]
        return start if 0 <= start <= most else most
    except (KeyError, TypeError, IndexError):
        return most


Path = list[Any]


def paths(value: Any, at: Path | None = None) -> list[Path]:
    """The path of every value in a JSON value but the root."""
    at = at or []
    found: list[Path] = [at] if at else []
    if isinstance(value, dict | list):
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            found += paths(inner, [*at, key])
    return found


def mutated(value: Any, rng: random.Random) -> Any:
    """A JSON value with one to three changes anywhere in it."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = paths(value)
        if not places:
            return value
        path = rng.choice(places)
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        rng.choice(_CHANGES)(parent, path[-1], value, rng)
    return value


def _replace(parent: Any, key: Any, root: Any, rng: random.Random) -> None:
    parent[key] = copy.deepcopy(rng.choice(STRANGE))


def _swap(parent: Any, key: Any, root: Any, rng: random.Random) -> None:
    path = rng.choice(paths(root))
    other = root
    for step in path:
        other = other[step]
    parent[key] = copy.deepcopy(other)


def _remove(parent: Any, key: Any, root: Any, rng: random.Random) -> None:
    del parent[key]


def _repeat(parent: Any, key: Any, root: Any, rng: random.Random) -> None:
    if isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[f"{key}x" if rng.random() < 0.5 else str(rng.choice(STRANGE))[:50]] = parent[key]


def _shift(parent: Any, key: Any, root: Any, rng: random.Random) -> None:
    number = parent[key]
    if isinstance(number, int):
        parent[key] = rng.choice((number + 1, number - 1, number * 2, number // 2, -number))
    elif isinstance(number, str) and number:
        at = rng.randrange(len(number))
        parent[key] = number[:at] + rng.choice("0123456789[]:,/@#%SR(){}x") + number[at + 1 :]


def _nest(parent: Any, key: Any, root: Any, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 3, 300))):
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"list": [parent[key]]}


_CHANGES: tuple[Callable[[Any, Any, Any, random.Random], None], ...] = (
    *(_replace, _replace, _shift, _shift),
    *(_swap, _remove, _repeat, _nest),
)


def forged(objects: Objects, rng: random.Random, at: str = "") -> Objects:
    """The objects of a checkpoint with something forged in manifest, header or checksum table."""
    manifest = manifest_of(objects, at)
    kind = rng.choice(("manifest", "manifest", "header", "header", "table", "length"))
    if kind == "manifest":
        return with_manifest(objects, mutated(manifest, rng), at)
    number = rng.randrange(len(manifest["files"]))
    record = manifest["files"][number]
    name = f"{at}data/{manifest['save_id']}/{record['rank']:05d}.safetensors"
    header, body = header_of(objects[name])
    fit = rng.random() < 0.7
    if kind == "header":
        changed = mutated(header, rng)
        changed = changed if isinstance(changed, dict) else header
        return with_file(objects, number, changed, body, at, fit=fit)
    start = record["data_bytes"]
    if kind == "table":
        table = bytearray(body[start:])
        if table:
            table[rng.randrange(len(table))] ^= 1 << rng.randrange(8)
        return with_file(objects, number, header, body[:start] + table, at, fit=fit)
    more = rng.choice((-1, 1, 16, 4096, -16, 1 << 20))
    longer = body + bytes(more) if more > 0 else body[:more]
    return with_file(objects, number, header, longer, at, fit=fit)
