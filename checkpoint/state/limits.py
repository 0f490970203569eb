"""What stored metadata may make a reader do: no size that a file states is believed before this.

A manifest or a header of a few kilobytes can state any size, and a sparse file has any length. So
lengths are compared with these limits before memory is taken, and JSON is measured before it is
parsed. Writers keep to the same limits, so that what was saved can be read.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Sequence
from typing import Any, cast

from dtckpt.errors import CheckpointError, Corrupt

METADATA_VARIABLE = "DTCKPT_METADATA_MIB"
"""Memory that parsed metadata may take: of a manifest, of a header, of the checksum tables of all
files that are open together."""
DEFAULT_METADATA_MIB = 256
"""Enough for a hundred thousand tensors."""
MAX_NESTING = 64
"""Containers within one another in a state dict, or in the metadata that a user gives."""
MAX_JSON_NESTING = 3 * MAX_NESTING + 8
"""The same in a manifest, where a container is up to three values within one another."""
MAX_DIMS = 64
"""Of a tensor or a mesh, as numpy has it."""
MAX_RANKS = 1 << 31
MAX_SIZE = 1 << 63
"""Bytes and sizes stay below it, since system calls take no larger ones."""
MIN_BLOCK_BYTES = 64
MAX_BLOCK_BYTES = 16 << 20

_MOST_SHOWN = 300
_KNOWN_KEYS = (
    *(b'"dtype":', b'"shape":', b'"mesh":', b'"placements":', b'"writer":', b'"plain":'),
    b'"order":',
    *(b'"tensor":', b'"data_offsets":'),
)


def metadata_bytes() -> int:
    """Return how much memory parsed metadata may take."""
    text = os.environ.get(METADATA_VARIABLE, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise CheckpointError(
            f"{METADATA_VARIABLE}={text!r}: expected a number of MiB, such as {4096}"
        )
    return int(text or DEFAULT_METADATA_MIB) << 20


def check_metadata_bytes(num_bytes: int, what: str) -> None:
    """Raise CheckpointError if metadata takes more memory than it may."""
    most = metadata_bytes()
    if num_bytes > most:
        raise CheckpointError(
            f"{what} would take {num_bytes >> 20} MiB of memory or more, and {most >> 20} are "
            "allowed, since a damaged or forged checkpoint can state any size. If it is not one, "
            f"set the environment variable {METADATA_VARIABLE} to as many MiB as are needed"
        )


def json_memory(text: bytes) -> int:
    """Return how much memory parsing a JSON text may take, by what stands in it.

    >>> json_memory(b'{"a": [1, 2]}') < 400
    True
    """
    # Measured on CPython 3.11: commas count the values, colons the places in dicts. Keys that
    # are met again and again are one string, and lie in dicts of a few.
    known = sum(text.count(key) for key in _KNOWN_KEYS)
    return (
        (2 if text.isascii() else 5) * len(text)
        + 130 * text.count(b"{")
        + 72 * text.count(b"[")
        + 95 * (text.count(b":") - known)
        + 40 * known
        + 30 * text.count(b",")
        + 22 * (text.count(b'"') - 2 * known)
    )


def parse_json(text: bytes, what: str) -> Any:
    """Return the value of a JSON text; Corrupt, naming ``what``, where it is malformed.

    CheckpointError where it would take too much memory.
    """
    check_metadata_bytes(json_memory(text), what)
    try:
        return json.loads(text.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what}: malformed JSON: {shown(error)}") from error


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


_SCALARS = frozenset({str, int, float, bool, type(None)})


def check_nesting(value: Any, most: int, what: str) -> None:
    """Raise ValueError if lists and dicts lie within one another more than ``most`` deep."""
    level = [value]
    for _ in range(most + 1):
        inner: list[Any] = []
        for item in level:
            if type(item) in _SCALARS:  # nearly all, of which there may be very many
                continue
            if isinstance(item, dict):
                inner += cast(dict[Any, Any], item).values()
            elif isinstance(item, list):
                inner += cast(list[Any], item)
        if not inner:
            return
        level = inner
    raise ValueError(f"{what} is nested more than {most} deep")


def json_copy(metadata: Any) -> Any:
    """Return metadata as it is now; CheckpointError unless it is a JSON value."""
    try:
        check_nesting(metadata, MAX_JSON_NESTING, "metadata")
        return json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"metadata must be a JSON value (None, bool, number, str, list, dict): {error}"
        ) from error


def check_shape(shape: Sequence[int], what: str, name: str = "") -> None:
    """Raise ValueError for a shape that no tensor can have, though it may have no elements."""
    too_many = len(shape) > MAX_DIMS
    # Where there are zeros, the product of the others; there are ten thousands of shapes to check.
    if too_many or (math.prod(shape) or math.prod([n or 1 for n in shape])) >= MAX_SIZE:
        what += f" {shown(name)}" if name else ""
        if too_many:
            raise ValueError(f"{what} has {len(shape)} dims, at most {MAX_DIMS} are possible")
        raise ValueError(f"{what} has the shape {shown(tuple(shape))}: its strides are too large")


def size_of(value: object, what: str, *, below: int = MAX_SIZE) -> int:
    """Return a size or a number from JSON; ValueError, naming ``what``, where it is none."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{what} is {shown(value)}, expected an int from 0 to below {below}")
    return value


def text_of(value: object, what: str) -> str:
    """Return a string from JSON; TypeError, naming ``what``, where it is none."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is {shown(value)}, expected a string")
    return value


def list_of(value: object, what: str) -> list[Any]:
    """Return a list from JSON; TypeError, naming ``what``, where it is none."""
    if not isinstance(value, list):
        raise TypeError(f"{what} is {shown(value)}, expected a list")
    return cast(list[Any], value)


def object_of(value: object, what: str) -> dict[str, Any]:
    """Return an object from JSON; TypeError, naming ``what``, where it is none."""
    if not isinstance(value, dict):
        raise TypeError(f"{what} is {shown(value)}, expected an object")
    return cast(dict[str, Any], value)


def shown(value: object) -> str:
    """Return a value as a message shows it, cut short: what a file holds may be of any length.

    >>> shown("ab"), len(shown("a" * 10**6)) < 400
    ("'ab'", True)
    """
    if type(value) in (str, bytes):
        text = repr(cast("str | bytes", value)[:_MOST_SHOWN])
        length = len(cast("str | bytes", value))
        return text if length <= _MOST_SHOWN else f"{text[:-1]}... ({length} characters)"
    try:
        text = _REPR.repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    except ValueError:
        return f"a {type(value).__name__} of very many digits"
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _bounded() -> reprlib.Repr:
    """Return what shows no more of a list of lists than a message takes: it may repeat itself."""
    shows = reprlib.Repr()
    shows.maxlevel = 4
    shows.maxdict = shows.maxlist = shows.maxtuple = shows.maxset = shows.maxfrozenset = 16
    shows.maxstring = shows.maxother = shows.maxlong = 2 * _MOST_SHOWN
    return shows


_REPR = _bounded()
