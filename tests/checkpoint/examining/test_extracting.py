from __future__ import annotations

import io
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.examining import extracting
from dtckpt.errors import Corrupt, LayoutMismatch, ObjectExists

STATE = {
    "a": torch.arange(60.0).reshape(6, 10),
    "b": torch.linspace(-3, 3, 9).bfloat16(),
    "flags": torch.tensor([True, False]),
    "four": torch.tensor([[0xA5, 0x12], [0, 1]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "eight": torch.tensor([1.5, -2, math.nan]).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "none": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extracting") / "c"
    ckpt.save(STATE, path)
    return path


@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_npy_files(
    source: Path, tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extracting, "_PIECE_BYTES", piece)
    a = STATE["a"].numpy()
    parts = {
        "a": a,
        "a[1:5:2, ::3]": a[1:5:2, ::3],
        "a[..., -1]": a[..., -1],
        "none": a[:0, :3],
    }
    for number, (text, expected) in enumerate(parts.items()):
        report = ckpt.extract(source, text, tmp_path / f"{number}.npy")
        found = np.load(tmp_path / f"{number}.npy")
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
        assert report.num_bytes == (tmp_path / f"{number}.npy").stat().st_size
    stream = io.BytesIO()
    ckpt.extract(source, "scalar", stream)
    assert np.load(io.BytesIO(stream.getvalue())) == 7


def test_what_numpy_does_not_have(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match=r"no bfloat16. Ask for the dtype float32"):
        ckpt.extract(source, "b", tmp_path / "b.npy")
    assert list(tmp_path.iterdir()) == []
    ckpt.extract(source, "b", tmp_path / "b.npy", dtype="float32")
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), STATE["b"].float().numpy())
    ckpt.extract(source, "b[2:]", tmp_path / "bits.npy", bits=True)
    bits = STATE["b"][2:].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(np.load(tmp_path / "bits.npy"), bits)
    ckpt.extract(source, "four[0]", tmp_path / "four.npy", dtype="float64")
    assert np.load(tmp_path / "four.npy").tolist() == [3.0, -1.0, 1.0, 0.5]
    with pytest.raises(LayoutMismatch, match="slices only"):
        ckpt.extract(source, "four[0,1]", tmp_path / "x.npy", dtype="float64")


def test_conversions_keep_all_values(source: Path, tmp_path: Path) -> None:
    for name, dtype in (
        ("a", "float16"),
        ("a", "int64"),
        ("scalar", "float32"),
        ("scalar", "float64"),
        ("b", "float16"),
    ):
        with pytest.raises(LayoutMismatch, match="wider type"):
            ckpt.extract(source, name, tmp_path / "x.npy", dtype=dtype)
    with pytest.raises(LayoutMismatch, match="expected one of float64"):
        ckpt.extract(source, "a", tmp_path / "x.npy", dtype="bfloat16")
    with pytest.raises(LayoutMismatch, match="not both"):
        ckpt.extract(source, "a", tmp_path / "x.npy", dtype="float64", bits=True)


def test_safetensors_files_hold_any_number_of_any_type(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    ckpt.extract(source, ["a[:, 3]", "b", "flags", "four[1]", "eight", "scalar", "none"], file)
    found = load_file(file)
    assert found.keys() == STATE.keys()
    expected = STATE | {"a": STATE["a"][:, 3], "four": STATE["four"][1]}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        same = found[name].reshape(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().reshape(-1).view(torch.uint8))
    ckpt.extract(source, ["b", "flags"], tmp_path / "y.safetensors", dtype="float64")
    assert load_file(tmp_path / "y.safetensors")["flags"].tolist() == [1, 0]


def test_what_cannot_be_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="holds one tensor"):
        ckpt.extract(source, ["a", "b"], tmp_path / "x.npy")
    with pytest.raises(LayoutMismatch, match="different tensors"):
        ckpt.extract(source, ["a[0]", "a[1]"], tmp_path / "x.safetensors")
    with pytest.raises(LayoutMismatch, match=r"expected the name of a \.npy"):
        ckpt.extract(source, "a", tmp_path / "x.pt")
    with pytest.raises(LayoutMismatch, match="in a bucket"):
        ckpt.extract(source, "a", "memory://x.npy")
    (tmp_path / "there.npy").write_bytes(b"mine")
    with pytest.raises(ObjectExists):
        ckpt.extract(source, "a", tmp_path / "there.npy")
    assert (tmp_path / "there.npy").read_bytes() == b"mine"


def test_nothing_is_left_where_a_block_is_damaged(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ckpt.copy(source, copy)
    (file,) = copy.glob("data/*/*.safetensors")
    raw = bytearray(file.read_bytes())
    at = raw.index(STATE["a"].numpy().tobytes())
    raw[at + 100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Corrupt, match="belong to a"):
        ckpt.extract(copy, "a", tmp_path / "a.npy")
    assert os.listdir(tmp_path) == ["copy"]
