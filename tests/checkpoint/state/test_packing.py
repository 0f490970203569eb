"""Containers of many plain values as bytes, and back."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.checkpoint.state.packing import MIN_PACKED, pack, unpack
from dtckpt.errors import Corrupt

N = 2 * MIN_PACKED


def no_leaf(_: object) -> bool:
    return False


def packed(value: Any) -> bytes:
    data = pack(value, may_hold=no_leaf, least=0)
    assert data is not None
    return bytes(data)


def exact(value: Any) -> Any:
    """Return what is equal for the same values of the same types alone; floats by their bits."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if kind in (list, tuple):
        return kind, [exact(item) for item in value]
    if isinstance(value, dict):
        return kind, [(exact(key), exact(item)) for key, item in value.items()]
    return kind, value


NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
CASES = {
    "ints": [0, -1, 127, -128],
    "wider ints": [2**40, -(2**63), 2**63 - 1],
    "above 2^63": [2**63, -(2**70), 1, 0],
    "hundreds of bits": [2**400, -(2**401)],
    "bools": [True, False],
    "floats": [0.0, -0.0, math.inf, -math.inf, NAN, 1e-310],
    "complex": [complex(NAN, -0.0), 1j],
    "strings": ["", "a/b", "\u00e9\U0001f600", "\ud800", "0"],
    "bytes": [b"", b"\x00\xff"],
    "nones": [None, None],
    "mixed": [1, True, 1.0, None, "1", b"1", (1,), [1], {"1": 1, 1: "1"}],
    "above 2^63 alone": [2**64 - 1, 0, 2**63],
    "tables": [(1, 0.5), (2, 1.5), [1, 2], [3, 4]],
    "rows of one kind": [(1, 0.5), (2, 1.5), (3, -0.0)],
    "dicts of the same keys": [{"a": 1, "b": [2]}, {"a": 3, "b": [4]}],
    "dicts of the same keys in another order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "dicts of other keys": [{"a": 1}, {"b": 2, 3: 4}],
    "empty dicts": [{}, {}],
    "texts": ["plain", "ascii", ""],
    "nested": [[[]], [[1], [2, [3]]], (), ((),), [{}], {}],
    "ordered": [OrderedDict([("b", 1), ("a", 2)]), Counter({"x": 3, "y": -1}), Counter()],
}


@pytest.mark.parametrize("name", CASES)
def test_values_come_back_equal_and_of_the_same_types(name: str) -> None:
    for value in (CASES[name], tuple(CASES[name]), dict(enumerate(CASES[name]))):
        assert exact(unpack(packed(value), "x")) == exact(value)


_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4)
)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=4)
    ),
    max_leaves=40,
)


@given(st.lists(_values, max_size=6))
@settings(deadline=None)
def test_any_container_comes_back(value: list[Any]) -> None:
    assert exact(unpack(packed(value), "x")) == exact(value)


def test_equal_values_have_equal_bytes() -> None:
    assert packed([1, "a", 2.0] * N) == packed([1, "a", 2.0] * N)
    assert packed([1] * N) != packed([True] * N)
    assert packed([0.0] * N) != packed([-0.0] * N)


def test_numbers_take_a_few_bytes_each() -> None:
    assert len(packed(list(range(100_000)))) < 4.1 * 100_000
    assert len(packed([2**70 + i for i in range(100_000)])) < 9.1 * 100_000


class Other(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        [Other(1)] * N,
        [object()] * N,
        [{(1, 2): 3}] * N,
        [{1: 3}, {True: 3}] * N,
        [{"param_groups": []}] * N,
        [1] * 5,
        [2**20_000] * N,
    ],
)
def test_what_does_not_fit_is_not_packed(value: list[Any]) -> None:
    assert pack(value, may_hold=no_leaf) is None


def test_damaged_bytes_are_told() -> None:
    good = packed([1, None, "text", (2.5, {"a": [True]}), 2**80])
    for end in range(len(good)):
        with pytest.raises(Corrupt):
            unpack(good[:end], "seen")
    with pytest.raises(Corrupt, match="seen"):
        unpack(good + b"\0", "seen")
    for position in range(len(good)):  # whatever it says, there is a value or this error
        for bit in (1, 64, 255):
            bad = bytearray(good)
            bad[position] ^= bit
            with contextlib.suppress(Corrupt):
                unpack(bad, "seen")


def test_keys_that_all_have_are_written_once() -> None:
    rows = [{"loss": i * 0.5, "step": i} for i in range(10_000)]
    assert len(packed(rows)) < 13.1 * len(rows)  # 10 bytes of values, and its own length and kinds
    mixed = [*rows, {"loss": 1.0}]
    assert unpack(packed(mixed), "x") == mixed


@pytest.mark.parametrize("forged", [b'"same_keys":true', b'"same_keys":true   '])
def test_forged_keys_are_told(forged: bytes) -> None:
    good = packed([{"a": 1, "b": 2}, {"c": 3, "d": 4}])
    (length,) = struct.unpack_from("<I", good)
    head = good[4 : 4 + length].replace(b'"keys":', forged + b',"keys":', 1)
    with pytest.raises(Corrupt, match="other keys than they state"):
        unpack(struct.pack("<I", len(head)) + head + good[4 + length :], "x")
    good = packed([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    (length,) = struct.unpack_from("<I", good)
    for bad in (good.replace(b"ab", b"aa"), good.replace(b'"same_keys":true', b'"same_keys":null')):
        with pytest.raises(Corrupt, match="other keys than they state"):
            unpack(bad, "x")


def test_a_forged_count_takes_no_memory() -> None:
    header = b'{"levels":[{"count":1,"parts":[{"kind":"list","count":1,"lengths":"I64"}]},'
    header += (
        b'{"count":4611686018427387904,"parts":[{"kind":"none","count":4611686018427387904}]}]}'
    )
    data = struct.pack("<I", len(header)) + header + struct.pack("<q", 2**62)
    with pytest.raises(Corrupt, match="ends too soon"):
        unpack(data, "seen")
