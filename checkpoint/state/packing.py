"""Packed values: a container of plain values as bytes, so that many values are one node.

The container is taken apart level by level, and not value by value, so nearly all of the work is
done by loops of C. Level 0 has the container itself, level 1 its items, level 2 the items of these,
and so on. Each level is a *column*; values of one kind lie in it side by side. The bytes start with
the length of a JSON header, which declares the columns and their dtypes; the data follows in the
order of the header. docs/format.md describes every field.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, islice, repeat
from typing import Any, TypeVar, cast

from dtckpt.errors import Corrupt, Unsavable

from .limits import MAX_NESTING, list_of, object_of, shown, size_of, text_of
from .values import MAX_INT_BITS, decode_value, encode_value

MIN_PACKED = 1024
"""Fewer values stay nodes of the manifest, which every version reads: the state of Python's random
generator has 625."""

_KINDS: dict[type, str] = {
    type(None): "none",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytes: "bytes",
    list: "list",
    tuple: "tuple",
    dict: "dict",
    defaultdict: "dict",  # its factory is code, which a checkpoint does not hold
    OrderedDict: "ordered",
    Counter: "counter",
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}
_DICTS = ("dict", "ordered", "counter")
_INT_DTYPES = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MOST_WIDTH = 32
"""Bytes of ints that have all the same width; longer ones are decimals."""
_WIDTHS = {f"I{8 * width}": width for width in range(9, _MOST_WIDTH + 1)}
_LENGTH = struct.Struct("<I")
_MOST_KINDS = 256
_AT_ONCE = 4096
"""Ints that are made bytes together: few enough to stay in the processor's cache."""
_MOST_COLUMNS = 64
"""Items of containers that are made together, a table of them."""
_MOST_VALUES = 1 << 27


_Text = TypeVar("_Text", str, bytes)


class _NotPlain(Exception):
    """Something in the container has no place in a packed value."""


def pack(
    container: Any, *, may_hold: Callable[[Any], bool], least: int = MIN_PACKED, depth: int = 0
) -> bytearray | None:
    """Return a list, tuple or dict as bytes; None if it has few values, or some that do not fit.

    ``may_hold`` says of a value of another class than Python's own whether it is a plain leaf that
    has a node (``encode_value``). ``depth`` is the number of containers around this one. Equal
    containers give equal bytes.
    """
    try:
        return _Packer(may_hold).run(container, least, depth)
    except (_NotPlain, Unsavable):
        return None


class _Packer:
    def __init__(self, may_hold: Callable[[Any], bool]) -> None:
        self.may_hold = may_hold
        self.buffers: list[Any] = []

    def run(self, container: Any, least: int, depth: int) -> bytearray | None:
        level: list[Any] = [container]
        columns: list[dict[str, Any]] = []
        total = 0
        while level:
            if depth + len(columns) > MAX_NESTING:
                raise _NotPlain
            inner: list[Iterable[Any]] = []
            columns.append(self.column(level, inner))
            total += len(level)
            # One list at many places within lists would take much more memory than it does now.
            if sum(map(len, cast("list[list[Any]]", inner))) > _MOST_VALUES:
                raise _NotPlain
            level = list(chain.from_iterable(inner))
        if total <= least:
            return None
        header = json.dumps({"levels": columns}, separators=(",", ":")).encode()
        return bytearray().join([_LENGTH.pack(len(header)), header, *self.buffers])

    def column(self, values: list[Any], inner: list[Iterable[Any]]) -> dict[str, Any]:
        """Write the values of a level, and add what lies in its containers to ``inner``."""
        # In order of appearance, so that equal values give equal bytes on all ranks.
        kind_of = {cls: _KINDS.get(cls, "node") for cls in dict.fromkeys(map(type, values))}
        kinds = list(dict.fromkeys(kind_of.values()))
        if kinds == ["node"] or (kinds == ["none"]) or len(kinds) > 1:
            numbers = {cls: kinds.index(kind) for cls, kind in kind_of.items()}
            codes = bytes(map(numbers.__getitem__, map(type, values)))
            self.buffers.append(codes)
            parts = [
                self.part(kind, self.of_kind(values, codes, number), inner)
                for number, kind in enumerate(kinds)
            ]
        else:
            parts = [self.part(kinds[0], values, inner)] if kinds else []
        return {"count": len(values), "parts": parts}

    def of_kind(self, values: list[Any], codes: bytes, number: int) -> list[Any]:
        chosen = bytes(code == number for code in range(_MOST_KINDS))
        return list(compress(values, codes.translate(chosen)))

    def part(self, kind: str, values: list[Any], inner: list[Iterable[Any]]) -> dict[str, Any]:
        told: dict[str, Any] = {"kind": kind, "count": len(values)}
        np = _numpy()
        if kind == "bool":
            self.buffers.append(bytes(values))
        elif kind == "int":
            told["dtype"] = self.ints(values)
        elif kind == "float":
            self.buffers.append(np.array(values, dtype="<f8").tobytes())
        elif kind == "complex":
            self.buffers.append(np.array(values, dtype="<c16").tobytes())
        elif kind == "str":
            whole = "".join(values)
            if whole.isascii():  # bytes are as many as characters
                told["lengths"] = self.ints(list(map(len, values)))
                self.buffers.append(whole.encode())
            else:  # half of a surrogate pair is a character that UTF-8 has no bytes for
                told["lengths"] = self.texts([v.encode("utf-8", "surrogatepass") for v in values])
        elif kind == "bytes":
            told["lengths"] = self.texts(values)
        elif kind == "node":
            told["lengths"] = self.texts([self.node(value) for value in values])
        elif kind != "none":
            told["lengths"] = self.ints(list(map(len, values)))
            if kind in _DICTS:
                # Of all: True and 1 are equal.
                if not set(map(type, chain.from_iterable(values))) <= {str, int}:
                    raise _NotPlain
                keys, is_same = _keys_of(values)
                if is_same:
                    told["same_keys"] = True
                # What reads optimizers looks into the tree for their groups.
                if "param_groups" in keys:
                    raise _NotPlain
                told["keys"] = self.column(keys, [])
                values = [value.values() for value in values]
            inner += values
        return told

    def ints(self, values: list[int]) -> str:
        np = _numpy()
        try:
            array = np.array(values, dtype="<i8")
        except OverflowError:
            low, high = min(values), max(values)
            most = max(low.bit_length(), high.bit_length())
            if most <= 64 and low >= 0:
                self.buffers.append(np.array(values, dtype="<u8").tobytes())
                return "U64"
            if most > MAX_INT_BITS:
                raise _NotPlain from None
            width = most // 8 + 1  # with a bit for the sign
            if width <= _MOST_WIDTH:
                for start in range(0, len(values), _AT_ONCE):
                    some = values[start : start + _AT_ONCE]
                    each = [value.to_bytes(width, "little", signed=True) for value in some]
                    self.buffers.append(b"".join(each))
                return f"I{8 * width}"
            text = ",".join(map(str, values)).encode()
            if len(text) >= 1 << 32:
                raise _NotPlain from None
            self.buffers.append(_LENGTH.pack(len(text)))
            self.buffers.append(text)
            return "decimal"
        low, high = (int(array.min()), int(array.max())) if values else (0, 0)
        code, dtype = next(  # the last one holds all
            (code, dtype)
            for code, dtype in _INT_DTYPES.items()
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max
        )
        self.buffers.append(array.astype(dtype).tobytes())
        return code

    def texts(self, values: list[bytes]) -> str:
        code = self.ints(list(map(len, values)))
        self.buffers.append(b"".join(values))
        return code

    def node(self, value: Any) -> bytes:
        if not self.may_hold(value):
            raise _NotPlain
        return json.dumps(encode_value(value, "", allow_pickle=False)).encode()


def _keys_of(dicts: Sequence[dict[Any, Any]]) -> tuple[list[Any], bool]:
    """Return the keys of all dicts, or of one where all have the same ones, which is told."""
    first = list(dicts[0])
    if all(map(first.__eq__, map(list, dicts))):
        return first, True
    return list(chain.from_iterable(dicts)), False


def unpack(data: bytes | bytearray | memoryview, name: str) -> Any:
    """Return the container that was packed; Corrupt, with its name, where the bytes are none."""
    try:
        return _Unpacker(memoryview(data)).run()
    except Corrupt:
        raise
    except (LookupError, TypeError, ValueError, struct.error, UnicodeError, StopIteration) as error:
        raise Corrupt(f"{name}: malformed packed value: {shown(error)}") from error


def as_bytes(found: Any) -> bytes | memoryview:
    """Return the bytes of what was read: bytes, or a tensor or array of uint8."""
    if isinstance(found, bytes | bytearray | memoryview):
        return memoryview(found)
    return memoryview(_numpy().asarray(found[...]))


@dataclass(slots=True)
class _Unpacker:
    data: memoryview
    position: int = 0
    made: list[tuple[list[Any], list[Any]]] = field(
        default_factory=list[tuple[list[Any], list[Any]]]
    )

    def run(self) -> Any:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        header = object_of(json.loads(bytes(self.take(length))), "the header")
        told = list_of(header["levels"], "levels")
        if not 1 <= len(told) <= MAX_NESTING + 1:
            raise ValueError(f"{len(told)} levels")
        levels = [self.column(object_of(level, "a level")) for level in told]
        if self.position != len(self.data):
            raise ValueError(f"{len(self.data) - self.position} bytes are left over")
        # From the innermost level outwards: containers are made of values that are there.
        values: list[Any] = []
        for level in reversed(levels):
            values = level.build(values)
        (whole,) = values
        return whole

    def take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self.data):
            raise ValueError("it ends too soon")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def column(self, told: dict[str, Any], *, is_keys: bool = False) -> _Column:
        count = size_of(told["count"], "count")
        parts = [object_of(part, "a part") for part in list_of(told["parts"], "parts")]
        kinds = [text_of(part["kind"], "kind") for part in parts]
        codes = None
        if kinds in (["node"], ["none"]) or len(kinds) > 1:
            codes = bytes(self.take(count))
        elif not kinds and count:
            raise ValueError(f"a column of {count} values has no parts")
        if is_keys and not set(kinds) <= {"str", "int"}:
            raise ValueError(f"keys of dicts are {kinds}")
        # Before memory is taken: a kind that has no data of its own has one byte for each value.
        if sum(size_of(part["count"], "count") for part in parts) != count:
            raise ValueError("the counts of a column do not add up")
        made = [self.part(kind, part) for kind, part in zip(kinds, parts, strict=True)]
        if codes is not None:
            found = Counter(codes)
            if any(found[number] != part.count for number, part in enumerate(made)):
                raise ValueError("a column has other kinds than it states")
        return _Column(made, codes)

    def part(self, kind: str, told: dict[str, Any]) -> _Part:
        count = size_of(told["count"], "count")
        if kind == "none":
            return _Part(kind, count, [None] * count)
        if kind == "bool":
            found = self.array("<u1", count)
            if found.size and int(found.max()) > 1:
                raise ValueError("a bool is neither 0 nor 1")
            return _Part(kind, count, found.astype(bool).tolist())
        if kind == "int":
            return _Part(kind, count, self.ints(told["dtype"], count))
        if kind == "float":
            return _Part(kind, count, self.array("<f8", count).tolist())
        if kind == "complex":
            return _Part(kind, count, self.array("<c16", count).tolist())
        lengths = self.ints(told["lengths"], count)
        if lengths and min(lengths) < 0:
            raise ValueError("a length is negative")
        if kind in ("str", "bytes", "node"):
            data = bytes(self.take(sum(lengths)))
            if kind == "str" and data.isascii():
                return _Part(kind, count, _pieces(data.decode("ascii"), lengths))
            made = map(_FROM_BYTES[kind], _pieces(data, lengths))
            return _Part(kind, count, list(made))
        if kind not in _MAKERS:
            raise ValueError(f"unknown kind {shown(kind)}")
        keys: list[Any] | None = None
        if kind in _DICTS:
            keys = self.column(object_of(told["keys"], "keys"), is_keys=True).build([])
            has_same = told.get("same_keys", False)
            wanted = set(lengths) if has_same else {sum(lengths)}
            if wanted != {len(keys)} or len(set(keys)) < len(keys) * bool(has_same):
                raise ValueError("dicts have other keys than they state")
            return _Part(kind, count, lengths=lengths, keys=keys, has_same_keys=bool(has_same))
        return _Part(kind, count, lengths=lengths)

    def array(self, dtype: str, count: int) -> Any:
        np = _numpy()
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def ints(self, code: object, count: int) -> list[int]:
        if code == "decimal":
            (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
            found = list(map(int, bytes(self.take(length)).decode("ascii").split(",")))
            if len(found) != count:
                raise ValueError(f"{len(found)} numbers, expected {count}")
            return found
        if code == "U64":
            return self.array("<u8", count).tolist()
        if code in _INT_DTYPES:
            return self.array(_INT_DTYPES[cast(str, code)], count).tolist()
        width = _WIDTHS.get(code) if isinstance(code, str) else None
        if width is None:
            raise ValueError(f"unknown dtype of ints {shown(code)}")
        items = struct.iter_unpack(f"{width}s", self.take(width * count))
        return [int.from_bytes(item, "little", signed=True) for (item,) in items]


@dataclass(slots=True)
class _Part:
    kind: str
    count: int
    leaves: list[Any] | None = None
    lengths: list[int] = field(default_factory=list[int])
    keys: list[Any] | None = None
    has_same_keys: bool = False
    """Whether ``keys`` are those of each of the dicts."""

    def build(self, items: Iterator[Any]) -> list[Any]:
        """Return the values; containers take theirs from ``items``."""
        if self.leaves is not None:
            return self.leaves
        make = _MAKERS[self.kind]
        first = self.lengths[0] if self.lengths else 0
        is_table = 0 < first <= _MOST_COLUMNS and self.lengths.count(first) == len(self.lengths)
        if is_table and (self.keys is None or self.has_same_keys):  # made by loops of C
            rows = islice(zip(*[items] * first, strict=False), len(self.lengths))
            if self.keys is not None:
                return list(map(make, map(zip, repeat(self.keys), rows)))
            return list(rows) if make is tuple else list(map(make, rows))
        if self.keys is None:
            return [make(islice(items, length)) for length in self.lengths]
        keys = iter(self.keys)
        return [
            make(zip(islice(keys, length), islice(items, length), strict=True))
            for length in self.lengths
        ]


@dataclass(slots=True)
class _Column:
    parts: Sequence[_Part]
    codes: bytes | None

    def build(self, inner: list[Any]) -> list[Any]:
        """Return the values of a level, whose containers hold those of the next one."""
        if sum(sum(part.lengths) for part in self.parts) != len(inner):
            raise ValueError("containers hold another number of values than there are")
        items = iter(inner)
        built = [part.build(items) for part in self.parts]
        if self.codes is None:
            return built[0] if built else []
        if len(built) == 1:
            return built[0]
        streams = list(map(iter, built))
        return list(map(next, map(streams.__getitem__, self.codes)))


def _pieces(data: _Text, lengths: list[int]) -> list[_Text]:
    ends = list(accumulate(lengths))
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _of_node(text: bytes) -> Any:
    return decode_value(json.loads(text), "", allow_pickle=False)


_FROM_BYTES: dict[str, Callable[[bytes], Any]] = {
    "str": lambda text: text.decode("utf-8", "surrogatepass"),
    "bytes": bytes,
    "node": _of_node,
}


def _numpy() -> Any:
    import numpy as np  # only where there are such values

    return np
