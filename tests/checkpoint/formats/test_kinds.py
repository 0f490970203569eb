"""What a file is, is told by its content, whatever its name ends in."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dtckpt.checkpoint as ckpt
from dtckpt.errors import CheckpointError, Corrupt, NotCommitted

from ...conftest import S3

WEIGHT = torch.arange(6.0).view(2, 3)


def saved(*, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save({"w": WEIGHT}, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


FORMS: dict[str, bytes] = {
    "torch.save": saved(),
    "torch.save before 1.6": saved(legacy=True),
    "safetensors": save({"w": WEIGHT}),
}
NAMES = (
    *(
        "w.pth.tar",
        "w.jit",
        "w.npz",
        "w.pkl",
        "deadbeef",
        "w.pt",
        "w.safetensors",
        "w.safetensors.tmp",
    ),
    *("W.SAFETENSORS", "step-10", "w.json", "a b.th"),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_files_are_opened_whatever_their_names_end_in(tmp_path: Path, form: str, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(FORMS[form])
    for place in (file, file.as_uri()):
        with ckpt.open(place) as opened:
            assert opened["w"][...].equal(WEIGHT)
    into = {"w": torch.zeros(2, 3)}
    ckpt.load(into, file, no_dist=True)
    assert into["w"].equal(WEIGHT)
    assert ckpt.verify(file).problems == ()


def test_files_in_buckets(s3: S3) -> None:
    for name in ("w.pth.tar", "w.pkl", "w.gz"):
        s3.store.publish(name, FORMS["torch.save"], overwrite=False)
        with ckpt.open(f"{s3.url}/{name}", storage_options=s3.options) as opened:
            assert opened["w"][...].equal(WEIGHT)


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("w.pt")
        info.size = len(saved())
        archive.addfile(info, io.BytesIO(saved()))
    return stream.getvalue()


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.ones(3), b=np.zeros(2))
    return stream.getvalue()


def npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.ones(3))
    return stream.getvalue()


def script() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), stream)
    return stream.getvalue()


def alone(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
OTHERS: dict[str, tuple[Callable[[], bytes], type[CheckpointError], str]] = {
    "pointer": (lambda: POINTER, Corrupt, r"a pointer of git-lfs.*git lfs pull"),
    "page": (lambda: b"\n<!DOCTYPE html><html>404</html>" * 9, Corrupt, r"a web page.*download"),
    "answer": (lambda: b"<?xml version='1.0'?><Error>AccessDenied</Error>", Corrupt, "web page or"),
    "nothing": (lambda: b"", Corrupt, r"the file is empty\. Fetch"),
    "zeros": (lambda: bytes(100_000), Corrupt, r"512 zero bytes: it was made but never written"),
    "gzip": (lambda: gzip.compress(saved()), CheckpointError, r"compressed by gzip.*unpack it"),
    "tar": (tarred, CheckpointError, r"a tar archive.*unpack it"),
    "GGUF": (lambda: b"GGUF\x03\0\0\0" + bytes(99), CheckpointError, r"a GGUF file of llama\.cpp"),
    "HDF5": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(99), CheckpointError, r"an HDF5 file"),
    "npz": (npz, CheckpointError, r"arrays of numpy \(\.npz\).*numpy\.load"),
    "npy": (npy, CheckpointError, r"an array of numpy.*numpy\.load"),
    "script": (script, CheckpointError, r"a program of TorchScript.*torch\.jit\.load"),
    "pickle": (lambda: pickle.dumps({"a": 1}), CheckpointError, r"a plain pickle, not one of"),
    "index": (lambda: b'{"weight_map": {}}', CheckpointError, r"an index of weights.*directory"),
    "JSON": (lambda: b'{"a": 1}', CheckpointError, r"a JSON text, without tensors"),
    "a tensor": (
        lambda: alone(WEIGHT),
        CheckpointError,
        r"not a dict was saved, but a tensor of shape \(2, 3\) and dtype torch\.float32\. Load it",
    ),
    "a list": (lambda: alone([WEIGHT, 1]), CheckpointError, r"saved, but a list of 2\. Load it"),
}


@pytest.mark.filterwarnings("ignore")  # of torch's own: TorchScript is deprecated
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model"])
def test_what_is_in_the_place_of_weights_is_said(tmp_path: Path, kind: str, name: str) -> None:
    make, error, told = OTHERS[kind]
    file = tmp_path / name
    file.write_bytes(make())
    places = [file] if name == "model" else [file, tmp_path]
    if kind in ("a tensor", "a list", "npz", "script") and name == "model.safetensors":
        places = [file]  # in a directory a zip archive of that name is refused as one
    for place in places:
        for call in (ckpt.open, ckpt.verify):
            with pytest.raises(error, match=told) as caught:
                call(place)
            assert (type(caught.value) is Corrupt) == (error is Corrupt)


def test_archives_that_are_called_safetensors_are_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(saved())
    with pytest.raises(Corrupt, match=r"a file of torch\.save .*by its own path"):
        ckpt.open(tmp_path)
    assert ckpt.open(tmp_path / "model.safetensors")["w"][...].equal(WEIGHT)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("../../blobs/gone")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def of_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)


ODD: dict[Callable[[Path], None], str] = {
    fifo: "a FIFO",
    dangling: r"a symbolic link to \.\./\.\./blobs/gone, which does not exist",
    device: "a device",
    of_a_socket: "a socket",
}


@pytest.mark.parametrize("made", ODD)
def test_what_is_no_file_is_said(tmp_path: Path, made: Callable[[Path], None]) -> None:
    place = tmp_path / "weights"
    place.mkdir()
    made(place / "model.safetensors")
    for call in (ckpt.open, ckpt.verify):
        with pytest.raises(NotCommitted, match=f"model.safetensors is {ODD[made]}"):
            call(place / "model.safetensors")
        with pytest.raises(NotCommitted, match=rf"here, but model\.safetensors \({ODD[made]}\)"):
            call(place)


def test_a_link_of_an_index_that_leads_nowhere_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("../blobs/gone")
    index = {"weight_map": {"w": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Corrupt, match="is a symbolic link to a file that does not exist"):
        ckpt.open(tmp_path)


def test_the_manifest_is_no_file_of_tensors(tmp_path: Path) -> None:
    ckpt.save({"w": WEIGHT}, tmp_path / "ours")
    with pytest.raises(NotCommitted, match="is within the checkpoint"):
        ckpt.open(tmp_path / "ours/manifest.json")
    save_file({"w": WEIGHT}, tmp_path / "w.data")
    assert ckpt.open(tmp_path / "w.data")["w"][...].equal(WEIGHT)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.pkl", pickle.dumps({"author": "somebody", "classes": ["cat", "dog"]})),
        ("metadata.pkl", b"no pickle"),
        ("manifest.json", b'{"name": "a web app", "icons": []}'),
        ("manifest.json", b"not even JSON"),
        (".metadata", b"title: a model"),
        (".metadata", pickle.dumps({"x": 1})),
        ("metadata.json", b'{"sharded_backend": "of somebody", "common_backend": "x"}'),
    ],
)
def test_files_of_strangers_beside_weights(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    for call in (ckpt.open, ckpt.verify):
        with pytest.raises(CheckpointError):
            call(tmp_path)  # alone, it is what it was taken for
    save_file({"w": WEIGHT}, tmp_path / "model.safetensors")
    with ckpt.open(tmp_path) as opened:
        assert opened["w"][...].equal(WEIGHT)
        if name != "manifest.json":
            assert opened.metadata["passed_over"] == [name]
    into = {"w": torch.zeros(2, 3)}
    ckpt.load(into, tmp_path, no_dist=True)
    assert into["w"].equal(WEIGHT)


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_damaged_checkpoints_are_not_passed_over(tmp_path: Path) -> None:
    ckpt.save({"w": WEIGHT}, tmp_path)
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(b"\0" * 100)
    with pytest.raises(Corrupt):
        ckpt.open(tmp_path)
    dcp_save({"w": WEIGHT}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "dcp/model.safetensors")
    (tmp_path / "dcp/.metadata").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        ckpt.open(tmp_path / "dcp")


def test_metadata_may_be_null(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    head = json.dumps({"__metadata__": None, "w": entry}).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + WEIGHT.numpy().tobytes())
    assert ckpt.open(file)["w"][...].equal(WEIGHT)


@pytest.mark.parametrize("shape", [[2**40, 2**40, 0], [1] * 70 + [6], [2**62, 2, 0]])
def test_shapes_that_no_tensor_can_have(tmp_path: Path, shape: list[int]) -> None:
    size = 0 if 0 in shape else 24
    head = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))
    for call in (ckpt.open, ckpt.verify):
        with pytest.raises(Corrupt, match=r"its strides are too large|71 dims, at most 64"):
            call(file)
