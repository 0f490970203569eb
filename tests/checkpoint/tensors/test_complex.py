"""Tensors of complex128: safetensors has no such type, so files hold pairs of float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, Shard, distribute_tensor
from dtckpt.errors import LayoutMismatch

from ...ranks import run_ranks


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Complex numbers of all digits."""
    return torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))


def state() -> dict[str, Any]:
    """Tensors that lie in memory in every way."""
    odd = torch.tensor([complex(-0.0, float("nan")), complex(float("inf"), 5e-324)]).to(
        torch.complex128
    )
    return {
        "matrix": numbers(37, 21),
        "transposed": numbers(5, 9, seed=1).T,
        "every_third": numbers(90, seed=2)[::3],
        "conjugate": numbers(6, seed=3).conj(),
        "number": numbers(seed=4),
        "none": numbers(0, 3),
        "odd": odd,
        "array": numbers(4, 4, seed=5).numpy(),
        "real": torch.arange(7.0),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states have the same elements, bit for bit."""
    arrays = [
        {n: (v.resolve_conj().numpy() if isinstance(v, torch.Tensor) else v) for n, v in of.items()}
        for of in (one, other)
    ]
    return one.keys() == other.keys() and all(
        array.dtype == arrays[1][name].dtype
        and array.shape == arrays[1][name].shape
        and array.tobytes() == arrays[1][name].tobytes()
        for name, array in arrays[0].items()
    )


def read(lazy: dict[str, Any]) -> dict[str, Any]:
    """The values of what was opened."""
    return {name: value[...] for name, value in lazy.items()}


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("is_async", [False, True])
def test_all_bits_come_back(tmp_path: Path, compress: Any, is_async: bool) -> None:
    given = state()
    if is_async:
        ckpt.async_save(given, tmp_path, compress=compress, no_dist=True).result()
    else:
        ckpt.save(given, tmp_path, compress=compress, no_dist=True)
    assert not ckpt.verify(tmp_path).problems
    with ckpt.open(tmp_path) as opened:
        assert same(read(opened.state_dict()), given)
        assert opened["matrix"][3:5, 20].equal(given["matrix"][3:5, 20])
    rows = {n: torch.zeros(v.shape, dtype=torch.as_tensor(v).dtype) for n, v in given.items()}
    columns = {
        n: torch.zeros_like(v.T.contiguous()).T if v.ndim == 2 else v for n, v in rows.items()
    }
    for got in (rows, columns | {"array": np.zeros((4, 4), np.complex128)}):
        ckpt.load(got, tmp_path, no_dist=True)
        assert same(got, given)


def test_files_hold_pairs_and_manifests_say_what_they_are(tmp_path: Path) -> None:
    ckpt.save({"c": numbers(3, 2), "r": torch.ones(2)}, tmp_path, no_dist=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert "C128" in json.dumps(manifest)
    assert manifest["version"] == 3
    [file] = (tmp_path / "data").glob("*/*")
    pairs = safetensors.torch.load(file.read_bytes())["c"]
    assert torch.view_as_complex(pairs).equal(numbers(3, 2))
    ckpt.save({"r": torch.ones(2)}, tmp_path / "real", no_dist=True)
    assert json.loads((tmp_path / "real" / "manifest.json").read_text())["version"] == 1


def test_another_dtype_is_as_for_other_types(tmp_path: Path) -> None:
    given = {"w": numbers(40, 3), "s": numbers(5).to(torch.complex64)}
    ckpt.save(given, tmp_path, no_dist=True)
    got = {
        "w": torch.zeros(40, 3, dtype=torch.complex64),
        "s": torch.zeros(5, dtype=torch.complex128),
    }
    with pytest.raises(LayoutMismatch, match=r"complex64.*complex128"):
        ckpt.load(got, tmp_path, no_dist=True)
    with pytest.raises(LayoutMismatch, match="complex128"):
        ckpt.load(got, tmp_path, dtype_policy="widen", no_dist=True)
    ckpt.load({"s": got["s"]}, tmp_path, dtype_policy="widen", strict=False, no_dist=True)
    assert got["s"].equal(given["s"].to(torch.complex128))
    ckpt.load(got, tmp_path, dtype_policy="cast", no_dist=True)
    assert got["w"].equal(given["w"].to(torch.complex64))


@pytest.mark.parametrize("read_once", [False, True])
def test_ranks_cut_and_join_them(tmp_path: Path, read_once: bool) -> None:
    whole = numbers(7, 6)

    def save(rank: int, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        ckpt.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, tmp_path, process_group=group)

    def load(rank: int, group: Any) -> None:
        mesh = DeviceMesh.from_group(group, "cpu")
        got: dict[str, Any] = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])}
        if read_once:
            got = {"w": torch.zeros_like(whole)}
        ckpt.load(got, tmp_path, process_group=group, read_once=read_once)
        found = got["w"].full_tensor() if isinstance(got["w"], DTensor) else got["w"]
        assert found.equal(whole)

    run_ranks(3, save)
    run_ranks(2, load)


def test_tools_take_them(tmp_path: Path) -> None:
    one, other = {"c": numbers(6, 5), "r": torch.ones(2)}, {"c": numbers(6, 5), "r": torch.ones(2)}
    other["c"][2, 2] += 1
    ckpt.save(one, tmp_path / "one", no_dist=True)
    ckpt.save(other, tmp_path / "other", no_dist=True)
    told = ckpt.statistics(tmp_path / "one")["c"]
    assert told.num_values == 30
    assert told.dtype == "complex128"
    drift = ckpt.compare(tmp_path / "one", tmp_path / "other").tensors["c"].drift
    assert drift is not None
    assert (drift.num_changed, drift.max_abs) == (1, 1.0)
    ckpt.extract(tmp_path / "one", "c", tmp_path / "c.npy")
    assert np.array_equal(np.load(tmp_path / "c.npy"), one["c"].numpy())
    with pytest.raises(LayoutMismatch, match=r"'c': safetensors.* has no complex128.*npy"):
        ckpt.extract(tmp_path / "one", "c", tmp_path / "c.safetensors")
    with pytest.raises(LayoutMismatch, match="'c': no int is as wide as complex128"):
        ckpt.extract(tmp_path / "one", "c", tmp_path / "bits.npy", bits=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_programs_files(tmp_path: Path) -> None:
    given = {"c": numbers(6, 5), "t": numbers(4, 3, seed=1).T, "r": torch.ones(2)}
    torch.save(given, tmp_path / "c.pt")
    torch.save(given, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    state_dict_saver.save(dict(given), checkpoint_id=tmp_path / "dcp", no_dist=True)
    for place in ("c.pt", "old.pt", "dcp"):
        with ckpt.open(tmp_path / place) as opened:
            assert same(read(opened.state_dict()), given)
        assert not ckpt.verify(tmp_path / place).problems
        got = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in given.items()}
        ckpt.load(got, tmp_path / place, no_dist=True)
        assert same(got, given)
    ckpt.reshard(tmp_path / "c.pt", tmp_path / "ours")
    ckpt.export(tmp_path / "ours", tmp_path / "back", format="dcp")
    got = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in given.items()}
    state_dict_loader.load(got, checkpoint_id=tmp_path / "back", no_dist=True)
    assert same(got, given)
    with pytest.raises(LayoutMismatch, match=r"'c': safetensors.* has no complex128"):
        ckpt.export(tmp_path / "ours", tmp_path / "st")


def test_no_header_names_the_type(tmp_path: Path) -> None:
    header = json.dumps({"c": {"dtype": "C128", "shape": [1], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(16)
    )
    with pytest.raises(ckpt.Corrupt, match="unknown dtype 'C128'"):
        ckpt.open(tmp_path / "model.safetensors")
