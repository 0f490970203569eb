from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.formats.opening import open_place, stored_data
from dtckpt.checkpoint.reading import parts
from dtckpt.checkpoint.reading.parts import parse_part
from dtckpt.checkpoint.reading.wants import ArraySink
from dtckpt.errors import LayoutMismatch

TENSOR = torch.arange(7 * 5 * 6, dtype=torch.int32).reshape(7, 5, 6)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    ckpt.save({"m": {"w": TENSOR, "scalar": torch.tensor(3.5)}}, path)
    return path


BOUND = st.none() | st.integers(-8, 8)
INDEX = st.integers(-5, 4).map(str) | st.tuples(BOUND, BOUND, st.none() | st.integers(1, 4)).map(
    lambda bounds: ":".join("" if bound is None else str(bound) for bound in bounds)
)


@settings(max_examples=50)
@given(indices=st.lists(INDEX, max_size=3), has_ellipsis=st.booleans(), most=st.integers(4, 200))
def test_parts_are_those_of_numpy(
    place: Path, indices: list[str], has_ellipsis: bool, most: int
) -> None:
    if has_ellipsis or not indices:
        indices = [*indices, "..."]
    text = ", ".join(indices)
    expected = np.asarray(eval(f"array[{text}]", {"array": TENSOR.numpy()}))
    store = open_place(place)
    manifest = ckpt.read_manifest(store)
    part, data = parse_part(f"m/w[{text}]", manifest, store.url), stored_data(store, manifest)
    assert part.shape == expected.shape
    assert part.num_bytes == expected.nbytes
    np.testing.assert_array_equal(part.read(data), expected)
    pieces = list(part.pieces(data, most))
    assert b"".join(piece.tobytes() for piece in pieces) == expected.tobytes()
    assert all(piece.nbytes <= most for piece in pieces)


def test_what_lies_between_wanted_elements_is_not_held(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_SPAN_BYTES", 80)
    made: list[int] = []

    def sink(array: Any) -> ArraySink:
        made.append(array.nbytes)
        return ArraySink(array)

    monkeypatch.setattr(parts, "ArraySink", sink)
    store = open_place(place)
    manifest = ckpt.read_manifest(store)
    part = parse_part("m/w[::3, 1::2, ::5]", manifest, store.url)
    found = part.read(stored_data(store, manifest))
    np.testing.assert_array_equal(found, TENSOR.numpy()[::3, 1::2, ::5])
    assert max(made) <= 80


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m/v", "did you mean 'm/w'"),
        ("m/w[0", "the ] is missing"),
        ("m/w[0]x", "the ] is missing"),
        ("m/w[a]", "'a' is no index"),
        ("m/w[]", "'' is no index"),
        ("m/w[1:2:3:4]", "is no index"),
        ("m/w[::-1]", "positive step"),
        ("m/w[::0]", "'::0' is no index"),
        ("m/w[9]", "out of range"),
        ("m/w[0,0,0,0]", "too many indices"),
        ("m/scalar[0]", "too many indices"),
        ("m/w[...,...]", "too many indices"),
    ],
)
def test_what_is_no_part(place: Path, text: str, said: str) -> None:
    with pytest.raises(LayoutMismatch) as raised:
        parse_part(text, ckpt.read_manifest(open_place(place)), "here")
    assert said in str(raised.value)
