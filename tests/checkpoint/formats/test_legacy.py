"""Files of torch.save from before 1.6: five pickles, and the memory of storages."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.formats.kinds import LEGACY_MAGIC
from dtckpt.dtensor import Mesh, Shard, distribute_tensor
from dtckpt.errors import CheckpointError, Corrupt

from ...dtensor.rank_meshes import run_on_mesh
from .test_dcp import Poison, bits, same, stepped, whole
from .test_torch_save import TENSORS, Config


def save(state: Any, file: Path) -> None:
    torch.save(state, file, _use_new_zipfile_serialization=False)
    assert file.read_bytes().startswith(LEGACY_MAGIC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "eight bits"])
def test_every_tensor_is_read_as_it_was(file: Path, name: str) -> None:
    save({"first": torch.ones(3), name: TENSORS[name], "last": torch.zeros(2)}, file)
    with ckpt.open(file) as opened:
        found = opened[name]
        assert found.shape == tuple(TENSORS[name].shape)
        assert found.dtype == TENSORS[name].dtype
        assert bits(found[...]).equal(bits(TENSORS[name].detach()))
        assert opened["last"][...].equal(torch.zeros(2))
    assert ckpt.verify(file).problems == ()


def test_a_training_state_goes_on(file: Path) -> None:
    model, optimizer = stepped(1)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, file)
    again, fresh = stepped(2)
    state = {"model": again, "optimizer": fresh, "step": 0}
    ckpt.load(state, file, no_dist=True)
    assert state["step"] == 7
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_tensors_of_one_memory_stay_tied_and_numbers_keep_their_place(file: Path) -> None:
    weight = torch.randn(100, 10)
    many = {f"w{i}": torch.full((i,), float(i), dtype=torch.float64) for i in range(300)}
    save({"a": weight, "b": weight, "part": weight[5:9, 2:], **many}, file)
    with ckpt.open(file) as opened:
        assert opened.manifest.tensors["b"].same_as == "a"
        assert opened["part"][...].equal(weight[5:9, 2:])
        assert all(opened[name][...].equal(value) for name, value in many.items())


def test_each_rank_reads_its_part(file: Path) -> None:
    full = torch.randn(64, 32)
    save({"w": full}, file)

    def body(mesh: Any) -> int:
        into = {"w": distribute_tensor(torch.zeros(64, 32), mesh, [Shard(0)])}
        told = ckpt.load(into, file, process_group=mesh.get_group())
        assert into["w"].full_tensor().equal(full)
        return told.bytes_read

    assert run_on_mesh((4,), body) == [full.nbytes // 4] * 4


def test_objects_are_left_out_with_their_source(file: Path, tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "net": nn.Linear(2, 2), "code": Poison(), "cfg": Config()}
    save(state, file)
    with ckpt.open(file) as opened:
        assert set(opened.metadata["left_out"]) == {"net", "code", "cfg"}
        assert list(opened) == ["w"]
        assert opened["w"][...].equal(torch.ones(3))
    assert Poison.ran == []
    ckpt.reshard(file, tmp_path / "ours", Mesh.parse("a=1"), ckpt.parse_rules("*=R"))
    assert ckpt.open(tmp_path / "ours")["w"][...].equal(torch.ones(3))


def test_weights_in_a_directory(tmp_path: Path) -> None:
    save({"w": torch.arange(5)}, tmp_path / "pytorch_model.bin")
    assert ckpt.open(tmp_path)["w"][...].equal(torch.arange(5))


def of_torch_03(file: Path) -> None:
    """As torch 0.3 wrote it: views of storages, functions of its own, protocol 2."""

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor, (Pid("root"), 1, (2, 2), (1, 2))  # pyright: ignore

    class Pid:
        def __init__(self, key: str) -> None:
            self.key = key

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any, /) -> Any:
            if isinstance(obj, Pid):
                return "storage", torch.FloatStorage, "root", "cpu", 10, ("view", 3, 6)
            return None

    with file.open("wb") as stream:
        stream.write(LEGACY_MAGIC)
        pickle.dump(1001, stream, protocol=2)
        machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
        pickle.dump(machine, stream, protocol=2)
        Pickler(stream, protocol=2).dump({"w": Tensor()})
        pickle.dump(["root"], stream, protocol=2)
        stream.write(struct.pack("<q10f", 10, *range(10)))


def test_views_of_storages_as_torch_03_wrote_them(file: Path) -> None:
    of_torch_03(file)
    wanted = torch.tensor([[4.0, 6.0], [5.0, 7.0]])
    assert ckpt.open(file)["w"][...].equal(wanted)


def cut_in_the_elements(file: Path) -> None:
    save({"a": torch.ones(200)}, file)
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_the_pickles(file: Path) -> None:
    save({"a": torch.ones(200)}, file)
    file.write_bytes(file.read_bytes()[:200])


def of_another_count(file: Path) -> None:
    save({"a": torch.ones(200)}, file)
    content = bytearray(file.read_bytes())
    content[-808:-800] = (201).to_bytes(8, "little")
    file.write_bytes(content)


def of_another_byte_order(file: Path) -> None:
    save({"a": torch.ones(200)}, file)
    data = file.read_bytes()
    at = data.index(b"little_endian")
    flag = data.index(b"\x88", at)  # True
    file.write_bytes(data[:flag] + b"\x89" + data[flag + 1 :])


def of_another_version(file: Path) -> None:
    save({"a": torch.ones(200)}, file)
    data = file.read_bytes()
    file.write_bytes(data.replace(pickle.dumps(1001, protocol=2), pickle.dumps(1002, protocol=2)))


def without_a_key(file: Path) -> None:
    of_torch_03(file)
    keys = pickle.dumps(["root"], protocol=2)
    file.write_bytes(file.read_bytes().replace(keys, pickle.dumps(["toor"], protocol=2)))


def numbering_to_the_end(file: Path) -> None:
    save({"a": torch.ones(2)}, file)
    head = LEGACY_MAGIC + pickle.dumps(1001, protocol=2)
    file.write_bytes(head + b"\x80\x02Nr\xff\xff\xff\x7f." + bytes(100))


BROKEN: dict[Callable[[Path], None], str] = {
    cut_in_the_elements: r"state\.pt: the file has \d+ bytes, its pickles tell of \d+: it was cut",
    cut_in_the_pickles: r"state\.pt: a file of torch\.save as it was before 1\.6, cut short",
    of_another_count: r"has 201 elements in the file, 200 by the pickle",
    of_another_byte_order: r"written in another byte order",
    of_another_version: r"wrote it in version 1002; dtckpt reads 1001",
    without_a_key: r"malformed list of storages \['toor'\]",
    numbering_to_the_end: r"cut short after \d+ bytes, or damaged",
}


@pytest.mark.parametrize("made", BROKEN)
def test_what_is_broken_is_named(file: Path, made: Callable[[Path], None]) -> None:
    made(file)
    for call in (ckpt.open, ckpt.verify):
        with pytest.raises(CheckpointError, match=BROKEN[made]):
            call(file)


def test_a_file_that_is_replaced_meanwhile_is_noticed(file: Path) -> None:
    save({"a": torch.arange(4), "b": torch.zeros(4)}, file)
    opened, data = ckpt.open(file), bytearray(file.read_bytes())
    data[-1] ^= 1  # of another save the size may differ: names of storages are addresses
    file.write_bytes(data)
    with pytest.raises(Corrupt, match=r"was replaced while it was read|was written to while"):
        opened["a"][...]


def test_the_rest_of_its_values(file: Path) -> None:
    given = {"n": None, "list": [1, {"a": 2.5}], "text": "x" * 100_000, 3: (True, b"\x00")}
    save(given, file)
    assert whole(ckpt.open(file).state_dict()) == given
