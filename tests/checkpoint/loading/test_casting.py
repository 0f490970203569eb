"""Loading into another dtype than the one that was saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.loading.casting import ConvertingSink, is_lossless, may_convert
from dtckpt.checkpoint.tensors.dtypes import BY_TORCH_NAME
from dtckpt.dtensor import Box, DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import run_ranks
from ..test_together import same_error

NARROW = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
WIDE = ["int32", "int64", "uint32", "uint64", "float32", "float64"]


def saved(state: dict[str, Any]) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return store


def all_values(name: str) -> torch.Tensor:
    """Every value of a dtype of one or two bytes."""
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("saved_as", NARROW)
def test_what_is_called_lossless_is(saved_as: str) -> None:
    """Told by trying all values, in both directions: what is lossless is allowed."""
    values = all_values(saved_as)
    for wanted in NARROW + WIDE:
        there = values.to(getattr(torch, wanted))
        exact = torch.equal(as_numbers(there), as_numbers(values))
        nan = torch.equal(there.double().isnan(), values.double().isnan())
        signs = torch.equal(as_numbers(there).signbit(), as_numbers(values).signbit())
        is_float = getattr(torch, wanted).is_floating_point
        if is_lossless(saved_as, wanted):
            assert exact, wanted
            assert nan, wanted
            assert signs or not is_float, wanted
        elif saved_as != wanted and not wanted.startswith("float8"):
            assert not (exact and nan), wanted


def as_numbers(values: torch.Tensor) -> torch.Tensor:
    """Values as float64, without not-a-number, which is equal to nothing."""
    return values.to(torch.float64).nan_to_num(7e99, 8e99, -8e99)


def test_wide_integers() -> None:
    assert is_lossless("uint32", "float64")
    assert not is_lossless("uint64", "float64")
    assert not is_lossless("int32", "float32")
    assert not is_lossless("int64", "uint64")
    assert not is_lossless("float64", "float32")
    assert not is_lossless("float32", "complex64")
    assert not may_convert("cast", BY_TORCH_NAME["float4_e2m1fn_x2"], BY_TORCH_NAME["float32"])


@pytest.mark.parametrize(
    ("saved_as", "wanted", "policy", "hint"),
    [
        ("bfloat16", "float32", "error", 'pass dtype_policy="widen"'),
        ("float32", "bfloat16", "error", "give a destination of "),
        ("float32", "bfloat16", "widen", "give a destination of "),
        ("int64", "float32", "widen", "give a destination of "),
    ],
)
def test_dtypes_that_differ_are_an_error_on_all_ranks(
    saved_as: str, wanted: str, policy: Any, hint: str
) -> None:
    store = saved({"w": torch.ones(4, dtype=getattr(torch, saved_as)), "v": torch.ones(2)})

    def load(_: int, group: Any) -> None:
        state = {"w": torch.zeros(4, dtype=getattr(torch, wanted)), "v": torch.zeros(2)}
        try:
            dcp.load(state, store, process_group=group, dtype_policy=policy)
        finally:
            assert not state["v"].any()

    error = same_error(load)
    assert isinstance(error, LayoutMismatch)
    assert f"w: saved as {saved_as}[4], wanted as {wanted}[4]; {hint}" in str(error)


def test_policies_are_checked() -> None:
    with pytest.raises(LayoutMismatch, match="dtype_policy='any'"):
        dcp.load({"w": torch.ones(1)}, saved({"w": torch.ones(1)}), dtype_policy="any")  # pyright: ignore


@pytest.mark.parametrize(
    ("saved_as", "wanted", "policy"),
    [
        ("bfloat16", "float32", "widen"),
        ("float16", "float64", "widen"),
        ("bool", "int64", "widen"),
        ("uint8", "bfloat16", "widen"),
        ("float8_e4m3fn", "float16", "widen"),
        ("float32", "bfloat16", "cast"),
        ("float64", "int16", "cast"),
        ("float32", "float8_e5m2", "cast"),
        ("int64", "bool", "cast"),
        ("float32", "complex64", "cast"),
    ],
)
def test_values_are_those_of_torch(saved_as: str, wanted: str, policy: Any) -> None:
    values = (torch.arange(600) % 97 - 3).reshape(20, 30).to(getattr(torch, saved_as))
    store = saved({"w": values, "part": values.clone(), "scalar": values[1, 1].clone()})
    dtype = getattr(torch, wanted)
    base = torch.zeros(30, 40, dtype=dtype)
    state = {
        "w": torch.zeros(20, 30, dtype=dtype),
        "part": base[:, ::2].T,
        "scalar": torch.zeros((), dtype=dtype),
    }
    report = dcp.load(state, store, dtype_policy=policy)
    expected = values.to(dtype)
    for loaded, wanted_values in zip(
        state.values(), (expected, expected, expected[1, 1]), strict=True
    ):
        assert torch.equal(loaded.to(torch.complex128), wanted_values.to(torch.complex128))
    assert report.cast == dict.fromkeys(("w", "part", "scalar"), (saved_as, wanted))
    assert report.bytes_read == 1201 * values.itemsize
    assert report.bytes_needed == 1201 * dtype.itemsize


def test_only_what_differs_is_converted() -> None:
    store = saved({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16), "c": np.ones(2)})
    state = {"a": torch.zeros(3), "b": torch.zeros(3), "c": np.zeros(2)}
    report = dcp.load(state, store, dtype_policy="widen")
    assert state["b"].tolist() == [1, 1, 1]
    assert report.cast == {"b": ("bfloat16", "float32")}


def test_tied_tensors_are_compared_after_the_conversion() -> None:
    half = torch.full((4,), 0.1, dtype=torch.bfloat16)
    into = torch.zeros(4)
    dcp.load({"a": into, "b": into}, saved({"a": half, "b": half.clone()}), dtype_policy="widen")
    assert torch.equal(into, half.float())
    differing = saved({"a": half, "b": torch.full((4,), 0.1)})
    with pytest.raises(LayoutMismatch, match="different values for the two"):
        dcp.load({"a": into, "b": into}, differing, dtype_policy="widen")


def test_distributed_tensors_are_converted_too() -> None:
    values = torch.randn(8, 6)
    store = saved({"w": values})

    def load(rank: int, group: Any) -> tuple[torch.Tensor, bool]:
        mesh = DeviceMesh("cpu", Mesh((4,)), rank=rank)
        local = torch.zeros(8, [2, 2, 2, 0][rank], dtype=torch.bfloat16)
        tensor = DTensor.from_local(local, mesh, [Shard(1)], shape=(8, 6))
        report = dcp.load({"w": tensor}, store, process_group=group, dtype_policy="cast")
        return local, report.cast == {"w": ("float32", "bfloat16")}

    parts = run_ranks(4, load)
    assert torch.equal(torch.cat([part for part, _ in parts], 1), values.bfloat16())
    assert all(told for _, told in parts)


def test_large_tensors_are_converted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    put = ConvertingSink.put

    def measure(self: ConvertingSink, part: Any, items: Any) -> None:
        sizes.append(items.nbytes)
        put(self, part, items)

    monkeypatch.setattr(ConvertingSink, "put", measure)
    values = torch.arange(10 << 20, dtype=torch.int32)
    into = torch.zeros(10 << 20, dtype=torch.int64)
    dcp.load({"w": into}, saved({"w": values}), dtype_policy="widen")
    assert torch.equal(into, values.long())
    assert sum(sizes) == values.nbytes
    assert max(sizes) <= 16 << 20


def test_a_large_part_is_converted_in_small_ones() -> None:
    """Several threads convert at a time, and bfloat16 grows to four times its size."""
    puts: list[tuple[Box, int]] = []
    into = np.zeros((1000, 1200), dtype=np.uint64)

    class Recorder:
        is_memory = False

        def memory(self) -> None: ...

        def put(self, part: Box, items: Any) -> None:
            puts.append((part, items.nbytes))
            into[part.slices] = items

    sink = ConvertingSink(Recorder(), BY_TORCH_NAME["bfloat16"], BY_TORCH_NAME["float64"])
    values = torch.randn(990, 1100).bfloat16()
    sink.put(Box((10, 90), (990, 1100)), values.view(torch.int16).numpy().view(np.uint16))
    found = torch.from_numpy(into[10:, 90:1190].view(np.float64))
    assert torch.equal(found, values.double())
    assert max(size for _, size in puts) <= 2 << 20
    assert sum(size for _, size in puts) == values.numel() * 8
