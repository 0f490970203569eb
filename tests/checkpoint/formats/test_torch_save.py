"""Files of torch.save: opened by where their tensors lie, with nothing of their pickles run."""

from __future__ import annotations

import enum
import json
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.formats import trees
from dtckpt.dtensor import Mesh, Shard, distribute_tensor
from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, StorageError

from ...dtensor.rank_meshes import run_on_mesh
from ..tensors.subclass_stand_ins import State8bit
from .test_dcp import Poison, bits, same, stepped, whole

FULL = torch.arange(48.0).view(6, 8)
TENSORS: dict[str, Tensor] = {
    "whole": FULL,
    "rows": FULL[2:5],
    "columns": FULL[:, 3:6],
    "transposed": FULL.T,
    "permuted": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "every other": torch.arange(10)[::2],
    "one": torch.tensor(2.5, dtype=torch.bfloat16),
    "nothing": torch.empty(0, 3),
    "expanded": torch.ones(1, 4).expand(3, 4),
    "parameter": nn.Parameter(torch.randn(3, 2)),
    "eight bits": torch.randn(4, 4).to(torch.float8_e5m2),
    "flags": torch.tensor([True, False, True]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_read_as_it_was(file: Path, name: str) -> None:
    torch.save({"first": torch.ones(3), name: TENSORS[name], "last": torch.zeros(2)}, file)
    with ckpt.open(file) as opened:
        found = opened[name.replace("/", "%2F")]
        assert found.shape == tuple(TENSORS[name].shape)
        assert found.dtype == TENSORS[name].dtype
        assert bits(found[...]).equal(bits(TENSORS[name].detach()))
        assert opened["last"][...].equal(torch.zeros(2))
    assert ckpt.verify(file).problems == ()


def test_a_training_state_goes_on(file: Path) -> None:
    model, optimizer = stepped(1)
    given = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(given, file)
    again, fresh = stepped(2)
    state = {"model": again, "optimizer": fresh, "step": 0}
    ckpt.load(state, file, no_dist=True)
    assert state["step"] == 7
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_structure_and_values_are_what_they_were(file: Path) -> None:
    given = {
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "list": [torch.zeros(1), {"x": (1, None)}],
        7: "an int key",
        "sizes": torch.Size([2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
    }
    torch.save(given, file)
    found = whole(ckpt.open(file).state_dict())
    assert same(found, given)


def test_tensors_of_one_memory_stay_tied(file: Path) -> None:
    weight = torch.randn(100, 10)
    torch.save({"a": weight, "b": weight, "part": weight[:5]}, file)
    opened = ckpt.open(file)
    assert opened.manifest.tensors["b"].same_as == "a"
    assert opened["b"][...].equal(weight)
    assert opened["part"][...].equal(weight[:5])


def test_each_rank_reads_its_part(file: Path) -> None:
    full = torch.randn(64, 32)
    torch.save({"w": full}, file)

    def body(mesh: Any) -> int:
        into = {"w": distribute_tensor(torch.zeros(64, 32), mesh, [Shard(0)])}
        told = ckpt.load(into, file, process_group=mesh.get_group())
        assert into["w"].full_tensor().equal(full)
        return told.bytes_read

    assert run_on_mesh((4,), body) == [full.nbytes // 4] * 4


def test_it_becomes_a_checkpoint_of_ours(file: Path, tmp_path: Path) -> None:
    torch.save(TENSORS, file)
    ckpt.reshard(file, tmp_path / "ours", Mesh.parse("a=2"), ckpt.parse_rules("whole=S(1)"))
    assert ckpt.verify(tmp_path / "ours").problems == ()
    ours = ckpt.open(tmp_path / "ours")
    for name, tensor in TENSORS.items():
        assert bits(ours[name][...]).equal(bits(tensor.detach()))


def test_weights_of_hugging_face(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(2), "b": torch.zeros(3)}, {"c": torch.ones(4)}
    torch.save(one, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(two, tmp_path / "pytorch_model-00002-of-00002.bin")
    files = dict.fromkeys(one, "pytorch_model-00001-of-00002.bin")
    files |= dict.fromkeys(two, "pytorch_model-00002-of-00002.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    found = whole(ckpt.open(tmp_path).state_dict())
    assert same(found, one | two)
    index.write_text(json.dumps({"weight_map": files | {"d": files["c"]}}))
    with pytest.raises(Corrupt, match="the index names 'd' in pytorch_model-00002"):
        ckpt.open(tmp_path)


def not_a_file(file: Path) -> None:
    file.write_bytes(b"words")


def cut_short(file: Path) -> None:
    torch.save({"a": torch.ones(200)}, file)
    file.write_bytes(file.read_bytes()[:-30])


def of_nothing_but_code(file: Path) -> None:
    torch.save({"b": {"c": Poison(), "d": {}}}, file)


def conjugate(file: Path) -> None:
    torch.save({"a": torch.tensor([1 + 2j, 3 - 4j]).conj()}, file)


def negative(file: Path) -> None:
    torch.save({"a": torch.tensor([1 + 2j, 3 - 4j]).conj().imag}, file)


def a_module(file: Path) -> None:
    torch.save(nn.Linear(2, 2), file)


def no_dict(file: Path) -> None:
    torch.save([torch.ones(2)], file)


def rewritten(file: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(8))


def beyond_its_memory(file: Path) -> None:
    torch.save({"a": torch.ones(200)}, file)
    pickled = zipfile.ZipFile(file).read(f"{file.stem}/data.pkl")
    rewritten(file, pickled)


def zipped_anew(file: Path, method: int) -> None:
    """Zip what an archive holds as other programs do."""
    with zipfile.ZipFile(file) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def compressed(file: Path) -> None:
    torch.save({"a": torch.ones(200)}, file)
    zipped_anew(file, zipfile.ZIP_BZIP2)


def with_a_directory_that_lies(file: Path, at: int, data: bytes) -> None:
    torch.save({"a": torch.ones(200)}, file)
    content = bytearray(file.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + at : entry + at + len(data)] = data
    file.write_bytes(content)


def of_another_version(file: Path) -> None:
    with_a_directory_that_lies(file, 6, b"\xff\x00")


def beyond_its_end(file: Path) -> None:
    with_a_directory_that_lies(file, 42, b"\x00\xff\xff\x7f")


def within_a_record(file: Path) -> None:
    with_a_directory_that_lies(file, 42, b"\x07\x00\x00\x00")


def of_odd_sizes(file: Path) -> None:
    torch.save({"a": torch.ones(2, 3)}, file)
    pickled = zipfile.ZipFile(file).read(f"{file.stem}/data.pkl")
    assert b"K\x02K\x03\x86" in pickled  # the shape, two sizes in a tuple
    rewritten(file, pickled.replace(b"K\x02K\x03\x86", b"K\x02K\x030\x85", 1))  # one of them


def laughing(file: Path) -> None:
    lists: list[Any] = ["ha"]
    for _ in range(40):
        lists = [lists, lists]
    rewritten(file, pickle.dumps({"a": lists}))


BROKEN: dict[Callable[[Path], None], str] = {
    not_a_file: r"state\.pt .*no archive of torch\.save",
    cut_short: r"state\.pt .*no archive of torch\.save",
    of_nothing_but_code: r"state\.pt: the pickle asks for .*harmless",
    conjugate: r"state\.pt: a tensor .* computes its values \(\{.conj.: True\}\).*resolve_conj",
    negative: r"state\.pt: a tensor .* computes its values \(\{.neg.: True\}\).*resolve_neg",
    a_module: r"the pickle asks for torch\.nn\.modules\.linear\.Linear",
    no_dict: r"state\.pt: not a dict was saved",
    beyond_its_memory: r"'a': a tensor of shape .* does not lie in its memory of 8 bytes",
    compressed: r"the record '.*' is compressed by another method than deflate",
    of_another_version: r"state\.pt .*no archive of torch\.save",
    beyond_its_end: r"the record 'data\.pkl' does not lie in the archive",
    within_a_record: r"the record 'data\.pkl' does not lie in the archive",
    of_odd_sizes: r"malformed pickle of \d+ bytes: .*a tensor of shape \(2,\) and strides",
    laughing: r"is a value of too many parts",
}


@pytest.mark.parametrize("made", BROKEN)
def test_what_is_broken_is_named(
    file: Path, made: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "_MOST_NODES", 10_000)  # a million takes seconds
    made(file)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.open(file),
        lambda: ckpt.verify(file),
        lambda: ckpt.load({"a": torch.zeros(2)}, file, no_dist=True),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=BROKEN[made]):
            call()
    assert Poison.ran == []


class Config:
    """A class of a training script, which no other program has."""

    def __init__(self) -> None:
        self.lr = 0.1
        self.weights = torch.full((3,), 7.0)


class Level(enum.Enum):
    """An enum of such a script."""

    LOW = 1


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "an object": (lambda: Config(), f"{__name__}.Config"),
    "a class": (lambda: nn.Linear, "torch.nn.modules.linear.Linear"),
    "a module": (lambda: nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "an enum": (lambda: Level.LOW, f"{__name__}.Level"),
    "code": (lambda: Poison(), "builtins.getattr"),
    "a list with tensors": (
        lambda: [torch.ones(2), {"a": torch.ones(2)}, Config()],
        f"{__name__}.Config",
    ),
    "a key": (lambda: {nn.Linear: {"best": torch.ones(1)}}, "a dict with the key <class"),
    "another key": (lambda: {None: 1}, "a dict with the key None"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
    "a quantized tensor": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.quint8),
        "torch._utils._rebuild_qtensor",
    ),
    "a view that computes": (
        lambda: torch.tensor([1j]).conj(),
        "a tensor that is a view which computes",
    ),
    "made of others": (
        lambda: State8bit.zeros((2, 64)),
        "a tensor of class tests.checkpoint.tensors.subclass_stand_ins.State8bit",
    ),
    "half of a complex": (
        lambda: torch.ones(2, dtype=torch.complex32),
        "a tensor of torch.complex32",
    ),
    "memory": (lambda: torch.ones(2).untyped_storage(), "a value of type Storage"),
    "objects of numpy": (lambda: np.array([1, "a"], dtype=object), "numpy's dtype 'O8'"),
}


@pytest.mark.parametrize("key", [True, 1.5, None, (1, 2)])
def test_dicts_with_keys_that_have_no_name_are_left_out(file: Path, key: Any) -> None:
    torch.save({"odd": {"step": 5, key: torch.ones(1)}, "w": torch.ones(2), "n": {7: 1}}, file)
    with ckpt.open(file) as opened:
        assert opened.metadata["left_out"] == {"odd": f"a dict with the key {key!r}"}
        assert whole(opened.state_dict())["w"].equal(torch.ones(2))
        assert opened.state_dict()["n"] == {7: 1}


@pytest.mark.filterwarnings("ignore")  # of torch's own: quantized tensors
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_not_known_is_left_out_and_the_rest_is_read(
    file: Path, name: str, protocol: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    make, why = UNKNOWN[name]
    value = make()
    weight = torch.arange(6.0).view(2, 3)
    given = {
        "before": {"x": value, "n": None},
        "state_dict": {"w": weight, "tied": weight},
        "hyper": {"x": value, "y": [1, None]},
        "after": torch.ones(2),
    }
    torch.save(given, file, pickle_protocol=protocol)
    with ckpt.open(file) as opened:
        left_out = opened.metadata["left_out"]
        assert set(left_out) == {"before/x", "hyper/x"}
        assert all(told.startswith(why) for told in left_out.values())
        found = whole(opened.state_dict())
        with pytest.raises(KeyError, match=r"'hyper/x' was left out"):
            opened["hyper/x"]
        assert opened.manifest.tensors["state_dict/tied"].same_as == "state_dict/w"
    wanted = {
        "before": {"n": None},
        "state_dict": {"w": weight, "tied": weight},
        "hyper": {"y": [1, None]},
        "after": torch.ones(2),
    }
    assert same(found, wanted)
    assert Poison.ran == []
    assert "left out before/x (" in caplog.text
    assert "left out before/x (" in ckpt.verify(file).notes[0]
    into = {"w": torch.zeros(2, 3), "tied": torch.zeros(2, 3)}
    ckpt.load({"state_dict": into}, file, select="state_dict", no_dist=True)
    assert into["tied"].equal(weight)
    state = {"hyper": {"x": 1, "y": [1, None]}}
    with pytest.raises(CheckpointError, match="hyper/x"):
        ckpt.load(state, file, select="hyper", no_dist=True)
    ckpt.reshard(file, tmp_path / "ours", Mesh.parse("a=1"), ckpt.parse_rules("*=R"))
    assert ckpt.open(tmp_path / "ours").metadata["left_out"] == left_out


def test_tensors_that_lists_had_before_they_were_left_out_are_not_tied_to(file: Path) -> None:
    weight = torch.arange(3.0)
    torch.save({"list": [weight, Config()], "w": weight, "also": weight}, file)
    with ckpt.open(file) as opened:
        assert list(opened) == ["w", "also"]
        assert opened["w"][...].equal(weight)
        assert opened.manifest.tensors["also"].same_as == "w"


def test_objects_may_take_what_pickles_give_them(file: Path) -> None:
    """All opcodes that fill objects: of lists, sets and dicts of one's own classes."""
    made = {"a": torch.ones(1), "x": [Rows([1, 2]), Bag({1}), Table(a=1), Slots()]}
    for protocol in (2, 3, 4):
        torch.save(made, file, pickle_protocol=protocol)
        with ckpt.open(file) as opened:
            assert opened.metadata["left_out"] == {"x": f"{__name__}.Rows"}


class Rows(list[Any]):
    """A list with attributes."""


class Bag(set[Any]):
    """A set with attributes."""


class Table(dict[str, Any]):
    """A dict with attributes."""


class Slots:
    """An object of slots."""

    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


def records_twice(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    with zipfile.ZipFile(file, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zipfile, which warns of just this
        archive.writestr(f"{file.stem}/data/0", torch.full((2,), 7.0).numpy().tobytes())


def records_twice_but_for_case(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"{file.stem}/DATA.PKL", pickle.dumps({}))


def two_folders(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("other/data.pkl", pickle.dumps({"a": 1}))


def one_behind_the_other(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    first = file.read_bytes()
    torch.save({"a": torch.zeros(2)}, file)
    file.write_bytes(first + file.read_bytes())


def bytes_before(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    file.write_bytes(b"PK\x03\x04" + bytes(40) + file.read_bytes())


def two_directories(file: Path) -> None:
    """The end tells of a directory elsewhere: of another archive that lies in a record."""
    torch.save({"a": torch.zeros(2)}, file)
    other = file.read_bytes()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", other)
    content = bytearray(file.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    start = int.from_bytes(content[end + 16 : end + 20], "little") - 46
    content[end + 16 : end + 20] = start.to_bytes(4, "little")
    file.write_bytes(content)


def fewer_records_than_listed(file: Path) -> None:
    rewritten(file, pickle.dumps({"a": 1}))
    content = bytearray(file.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    content[end + 8 : end + 12] = b"\x02\x00\x02\x00"
    file.write_bytes(content)


def another_name_in_the_header(file: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.zeros(2)}, file)
    content = file.read_bytes()
    at = content.index(b"/data/0")
    file.write_bytes(content[:at] + b"/data/1" + content[at + 7 :])


TWOFOLD: dict[Callable[[Path], None], str] = {
    records_twice: r"has the record 'state/data/0' twice",
    records_twice_but_for_case: r"has the record 'state/DATA\.PKL' twice",
    two_folders: r"has records in the folders 'other' and 'state'",
    one_behind_the_other: r"has a directory that is not what, or where",
    bytes_before: r"has a directory that is not what, or where",
    two_directories: r"cut short|has a directory that is not what, or where",
    fewer_records_than_listed: r"has a directory that is not what, or where",
    another_name_in_the_header: r"the record 'data/0' has another name in its header",
}


@pytest.mark.parametrize("made", TWOFOLD)
def test_archives_that_say_two_things_are_refused(file: Path, made: Callable[[Path], None]) -> None:
    made(file)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.open(file)["a"][...],
        lambda: ckpt.load({"a": torch.zeros(2)}, file, no_dist=True),
    )
    for call in calls:
        with pytest.raises(Corrupt, match=TWOFOLD[made]):
            call()


def commented(file: Path) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b"hello" * 1000


def longer(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(bytes(10))


def stored_anew(file: Path) -> None:
    with zipfile.ZipFile(file) as old:
        records = {info.filename: old.read(info.filename) for info in old.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in reversed(records.items()):
            archive.writestr(name.replace("state/", "模型-é/"), data)


@pytest.mark.parametrize("change", [commented, longer, stored_anew])
def test_archives_that_torch_reads_all_the_same(file: Path, change: Callable[[Path], None]) -> None:
    torch.save({"a": torch.arange(500)}, file)
    change(file)
    assert torch.load(file)["a"].equal(torch.arange(500))
    assert ckpt.open(file)["a"][...].equal(torch.arange(500))


@pytest.mark.parametrize("has_crc", [True, False])
def test_a_file_that_is_replaced_meanwhile_is_noticed(file: Path, has_crc: bool) -> None:
    torch.serialization.set_crc32_options(has_crc)
    try:
        torch.save({"a": torch.arange(4), "b": torch.zeros(4)}, file)
        opened, size = ckpt.open(file), file.stat().st_size
        torch.save({"b": torch.zeros(4), "a": torch.arange(4)}, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert file.stat().st_size == size
    with pytest.raises(Corrupt, match="was replaced while it was read"):
        opened["a"][...]


def test_damage_in_a_pickle_is_noticed(file: Path) -> None:
    torch.save({"a": torch.arange(4), "text": "words"}, file)
    data = file.read_bytes()
    assert data.count(b"words") == 1
    file.write_bytes(data.replace(b"words", b"wards"))
    with pytest.raises(Corrupt, match=r"the record 'data\.pkl' is damaged"):
        ckpt.open(file)


def test_files_are_only_read(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    before = file.read_bytes()
    with pytest.raises((StorageError, NotCommitted, NotADirectoryError)):
        ckpt.save({"a": torch.zeros(2)}, file, no_dist=True)
    with pytest.raises((StorageError, NotCommitted)):
        ckpt.delete(file)
    assert file.read_bytes() == before
    with pytest.raises(NotCommitted, match="does not exist"):
        ckpt.open(file.with_name("other.pt"))


def test_archives_that_were_zipped_anew_are_read(file: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 9, (3000, 500), generator=generator).float()
    state = {
        "whole": memory,
        "rows": memory[7:90],
        "turned": memory.T,
        "few": torch.ones(3),
        "n": 1,
    }
    torch.save(state, file)
    zipped_anew(file, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < memory.nbytes / 2
    assert torch.load(file)["rows"].equal(memory[7:90]), "torch reads them"
    with ckpt.open(file) as opened:
        found = whole(opened.state_dict())
        assert all(found[name].equal(value) for name, value in state.items() if name != "n")
        assert opened["whole"][2900, 3:5].equal(memory[2900, 3:5])
        assert opened["rows"][80:, 499].equal(memory[87:90, 499])
    assert not ckpt.verify(file).problems
    got = {"turned": torch.zeros(500, 3000), "few": torch.zeros(3)}
    ckpt.load(got, file, strict=False)
    assert got["turned"].equal(memory.T)
    ckpt.reshard(file, tmp_path / "ours")
    assert ckpt.open(tmp_path / "ours")["whole"][...].equal(memory)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    verified = ckpt.verify(file)
    assert verified.problems
    assert "whole" in str(verified.problems)


def test_deflated_records_that_lie_are_told(file: Path) -> None:
    torch.save({"a": torch.arange(2000.0), "b": torch.ones(5)}, file)
    zipped_anew(file, zipfile.ZIP_DEFLATED)
    content = file.read_bytes()
    longer = bytearray(content)
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"data/0")) + 24
    longer[at : at + 4] = struct.pack("<I", 8004)  # of what it is when it is not compressed
    file.write_bytes(longer)
    assert ckpt.verify(file).problems
