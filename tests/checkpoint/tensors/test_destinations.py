"""Destinations that share memory, and those whose memory is not their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.loading import shared_memory
from dtckpt.checkpoint.tensors.local_shard import LocalShard
from dtckpt.checkpoint.tensors.overlaps import find_sharing, overlaps_itself
from dtckpt.dtensor import DeviceMesh, DTensor, Layout, Mesh, Replicate, Shard
from dtckpt.errors import LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ..test_together import SIZE, same_error


def saved(state: dict[str, Any]) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return store


def test_tied_tensors_are_loaded_once_and_compared() -> None:
    tied = torch.arange(6.0)
    store = saved({"embed": tied, "head": tied})
    into = torch.zeros(6)
    dcp.load({"embed": into, "head": into}, store)
    assert torch.equal(into, tied)
    differing = saved({"embed": tied, "head": tied + 1})
    with pytest.raises(LayoutMismatch, match="different values for the two") as failure:
        dcp.load({"embed": into, "head": into}, differing)
    assert failure.value.overwritten == ()
    assert torch.equal(into, tied)
    apart = saved({"embed": tied, "head": tied.clone()})
    into.zero_()
    report = dcp.load({"embed": into, "head": into}, apart)
    assert torch.equal(into, tied)
    assert report.bytes_read == 3 * tied.nbytes  # both to compare them, and one to fill it


def test_tied_tensors_are_compared_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_STEP_BYTES", 64)
    values = {name: torch.randn(17, 5) for name in "abc"}
    again = {f"{name}2": tensor.clone() for name, tensor in values.items()}
    into = {name: torch.zeros(17, 5) for name in "abc"}
    tied = {**into, **{f"{name}2": tensor for name, tensor in into.items()}}
    dcp.load(tied, saved(values | again))
    assert all(into[name].equal(values[name]) for name in "abc")
    again["c2"][16, 4] += 1
    into["a"].zero_()
    with pytest.raises(LayoutMismatch, match="tensor 'c2' shares its memory"):
        dcp.load(tied, saved(values | again))
    assert not into["a"].any()


def test_destinations_that_look_at_shared_memory_in_other_ways() -> None:
    """As conjugates, as other dtypes, and as rows and columns."""
    values = torch.randn(3, 4, dtype=torch.complex64)
    store = saved({"a": values, "b": values.conj(), "c": values.view(torch.int64), "d": values.T})
    into = torch.zeros_like(values)
    state = {"a": into, "b": into.conj(), "c": into.view(torch.int64), "d": into.T}
    dcp.load(state, store)
    assert into.equal(values)
    wrong = saved({"a": values, "b": values})
    into.zero_()
    with pytest.raises(LayoutMismatch, match="tensor 'b' shares its memory"):
        dcp.load({"a": into, "b": into.conj()}, wrong)
    assert not into.any()


def test_two_halves_of_a_tensor_are_not_one_memory() -> None:
    whole, rows = torch.arange(8.0), Layout(Mesh((2,)), (Shard(0),), (8,))
    half = torch.full((4,), 7.0)
    state = {name: LocalShard(half, rows, (i,)) for i, name in enumerate(("first", "second"))}
    with pytest.raises(LayoutMismatch, match="tensor 'second' shares its memory"):
        dcp.load(state, saved({"first": whole, "second": whole}))
    assert half.eq(7).all()


def test_one_rank_alone_has_other_values_for_what_it_has_tied() -> None:
    store = saved({"a": torch.ones(4), "b": torch.zeros(4)})
    into = [torch.full((4,), 7.0) for _ in range(SIZE)]

    def load(rank: int, group: Any) -> None:
        state = {"a": into[rank], "b": into[rank] if rank == 1 else torch.full((4,), 7.0)}
        dcp.load(state, store, process_group=group)

    error = same_error(load)
    assert "rank 1" in str(error)
    assert "nothing was loaded" in str(error)
    assert all(tensor.eq(7).all() for tensor in into)


def test_tensors_that_overlap_in_part_are_loaded_as_they_were_saved() -> None:
    def make(start: float) -> dict[str, torch.Tensor]:
        cache, flat = torch.arange(start, start + 24).view(6, 4), torch.arange(start, start + 12)
        views = {"first": cache[:3], "w": flat[:8].view(2, 4), "b": flat[4:]}
        return {"cache": cache, "flat": flat, **views}

    store, into = saved(make(1.0)), make(0.0)
    before = {name: tensor.data_ptr() for name, tensor in into.items()}
    dcp.load(into, store)
    assert all(torch.equal(tensor, make(1.0)[name]) for name, tensor in into.items())
    assert before == {name: tensor.data_ptr() for name, tensor in into.items()}


def test_overlapping_destinations_of_other_values_are_an_error() -> None:
    store = saved({"a": torch.ones(4), "b": torch.zeros(4)})
    buffer = torch.full((6,), 7.0)
    with pytest.raises(LayoutMismatch, match="different values for the two") as failure:
        dcp.load({"a": buffer[:4], "b": buffer[2:]}, store)
    assert failure.value.overwritten == ()
    assert buffer.eq(7).all()


def test_views_that_interleave_are_fine() -> None:
    store = saved({"a": torch.ones(3, 2), "b": torch.zeros(3, 2)})
    buffer = torch.full((3, 4), 7.0)
    dcp.load({"a": buffer[:, ::2], "b": buffer[:, 1::2]}, store)
    assert buffer.tolist() == [[1, 0, 1, 0]] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_sharing_is_found_for_every_dtype(dtype: torch.dtype) -> None:
    base = torch.zeros(8, dtype=dtype)
    sharing = find_sharing([base[:4], base[4:], base[:4], base[3:5]])
    assert sharing.tied == {2: 0}
    assert sharing.overlapping == [(0, 3), (3, 1)] or sharing.overlapping == [(0, 3), (1, 3)]


def test_windows_overlap_themselves() -> None:
    assert overlaps_itself(torch.zeros(5).as_strided((3, 3), (1, 1)))
    assert not overlaps_itself(torch.zeros(6).as_strided((2, 3), (3, 1)))
    assert not overlaps_itself(torch.zeros(0, 3).expand(0, 3))


class Scaled(torch.Tensor):
    """A tensor whose elements are computed from another one, as quantized weights are."""

    payload: torch.Tensor

    @staticmethod
    def __new__(cls: type[Scaled], payload: torch.Tensor) -> Scaled:
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]
        made = make(cls, payload.shape, dtype=torch.float32)
        made.payload = payload
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.payload.float() if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    wrapped = Scaled(torch.ones(3, dtype=torch.int8))
    with pytest.raises(Unsavable, match=r"'w' is .*Scaled"):
        dcp.save({"w": wrapped}, MemoryStore())
    store = saved({"w": torch.ones(3)})
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    inside = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    inside._local_tensor = wrapped  # pyright: ignore[reportPrivateUsage]
    for destination, error in ((wrapped, LayoutMismatch), (inside, Unsavable)):
        with pytest.raises(error, match="Scaled"):
            dcp.load({"w": destination}, store)


def test_subclasses_that_are_only_names_are_saved() -> None:
    class Named(torch.nn.Parameter):
        """A parameter with a role."""

    into = Named(torch.zeros(3))
    dcp.load({"w": into}, saved({"w": Named(torch.ones(3))}))
    assert into.tolist() == [1, 1, 1]


def test_arrays_that_hold_more_than_an_array_are_refused() -> None:
    masked = np.ma.masked_array(np.arange(3.0), mask=[False, True, False])
    with pytest.raises(Unsavable, match="x"):
        dcp.save({"x": masked}, MemoryStore())
    record = np.zeros(2, dtype=[("a", "f4"), ("b", "i8")])
    with pytest.raises(Unsavable):
        dcp.save({"x": record[0]}, MemoryStore())
    assert dcp.open(saved({"x": record["a"]}))["x"][...].tolist() == [0, 0]


def test_a_default_device_does_not_leak_in() -> None:
    store = saved({"w": torch.ones(3)})
    with torch.device("meta"):
        assert dcp.open(store)["w"][...].tolist() == [1, 1, 1]


def test_values_of_each_rank_do_not_become_shared_ones() -> None:
    store = saved({"seed": dcp.PerRank(5)})
    with pytest.raises(LayoutMismatch, match="wrap the destination in PerRank"):
        dcp.load({"seed": 0}, store)
    with pytest.raises(LayoutMismatch, match="a shared value was saved"):
        dcp.load({"seed": dcp.PerRank(0)}, saved({"seed": 5}))


def test_the_root_is_a_dict() -> None:
    store = saved({"a": 1})
    with pytest.raises(LayoutMismatch, match=r"is a dict, or an object .*; got tuple"):
        dcp.load((0, 0), store)  # pyright: ignore[reportArgumentType]


def test_lazy_parameters_are_refused_until_they_are_there() -> None:
    with pytest.raises(Unsavable, match="not initialised"):
        dcp.save({"net": torch.nn.LazyLinear(3)}, MemoryStore())


def test_many_columns_of_one_buffer_are_told_apart_quickly() -> None:
    buffer = torch.zeros(50, 3000)
    sharing = find_sharing([buffer[:, i : i + 2] for i in range(0, 3000, 2)])
    assert not sharing.overlapping
    assert find_sharing([buffer[:, 0:2], buffer[:, 1:3]]).overlapping == [(0, 1)]
    one = torch.zeros(1, 5)
    again = one.as_strided((1, 5), (77, 1))
    assert find_sharing([one, again]).tied == {1: 0}


def test_empty_numpy_strings() -> None:
    state = {"a": np.str_(""), "b": np.bytes_(b"")}
    assert dcp.open(saved(state)).state_dict() == state
