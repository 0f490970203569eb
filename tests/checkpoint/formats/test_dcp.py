"""Checkpoints of torch.distributed.checkpoint, made by torch and read as ours are."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


def save(state: dict[str, Any], place: Path) -> Path:
    torch_dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def stepped(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.randn(3, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value[...] if isinstance(value, ckpt.LazyTensor) else value


def test_what_lies_beside_it_is_told(tmp_path: Path) -> None:
    """As Lightning saves it: hyper-parameters, loops and callbacks are in ``meta.pt``."""
    torch_dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"epoch": 3, "hyper_parameters": {"lr": 0.1}}, tmp_path / "meta.pt")
    with ckpt.open(tmp_path) as opened:
        assert opened.metadata == {"passed_over": ["meta.pt"]}
    assert ckpt.verify(tmp_path).notes == (
        "passed over meta.pt, which may be opened by their own paths",
    )
    assert ckpt.open(tmp_path / "meta.pt").state_dict() == {
        "epoch": 3,
        "hyper_parameters": {"lr": 0.1},
    }


def test_a_training_state_goes_on(tmp_path: Path) -> None:
    model, optimizer = stepped(1)
    given = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    place = save(given, tmp_path / "dcp")
    again, fresh = stepped(2)
    state = {"model": again, "optimizer": fresh, "step": 0}
    ckpt.load(state, place, no_dist=True)
    assert state["step"] == 7
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


VALUES: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 3,
    "float": 0.25,
    "text": "words",
    "bytes": b"\x00\xff",
    "pair": (1, (2.5, "x")),
    "list": [1, [2, 3]],
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "inner": {"deep": {"er": [None, 4]}},
    "odd/name[0]": 5,
    "with a tensor": (1, {"rows": torch.arange(6).view(2, 3)[1:]}),
}


def test_values_are_what_they_were(tmp_path: Path) -> None:
    place = save({**VALUES, "tensor": torch.ones(2)}, tmp_path / "dcp")
    with ckpt.open(place) as opened:
        found = whole(opened.state_dict())
    assert found.pop("tensor").equal(torch.ones(2))
    for name, value in VALUES.items():
        assert same(found[name], value), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.arange(12).view(3, 4),
        torch.randn(4, 6).bfloat16(),
        torch.randn(3, 3).to(torch.float8_e4m3fn),
        torch.randn(4, 4, dtype=torch.complex64),
        torch.randn(6, 4)[2:5],  # a view, of which torch copies the elements
        torch.tensor([True, False]),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_tensors_are_read_by_where_they_lie(tmp_path: Path, tensor: Tensor) -> None:
    place = save({"a": {"b": tensor}, "c": torch.ones(3)}, tmp_path / "dcp")
    opened = ckpt.open(place)
    made = opened["a/b"][...]
    assert made.dtype == tensor.dtype
    assert bits(made).equal(bits(tensor))
    assert ckpt.verify(place).problems == ()
    ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=1"), [])
    assert ckpt.verify(tmp_path / "ours").has_checksums
    again = ckpt.open(tmp_path / "ours")["a/b"][...]
    assert bits(again).equal(bits(tensor))


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    place = save({"a": torch.randn(1000, 1000), "b": torch.randn(1000, 1000)}, tmp_path / "dcp")
    into = {"b": torch.zeros(1000, 1000)}
    told = ckpt.load(into, place, strict=False, no_dist=True)
    assert told.bytes_needed == 4_000_000
    assert told.bytes_read == 4_000_000


class Poison:
    """Runs code when it is unpickled."""

    ran: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return (Poison.ran.append, ("ran",))


def poisoned_metadata(place: Path) -> None:
    save({"a": torch.ones(2)}, place)
    (place / ".metadata").write_bytes(pickle.dumps({"x": Poison()}))


def poisoned_value(place: Path) -> None:
    save({"a": torch.ones(2), "b": Poison()}, place)
    Poison.ran.clear()


def poisoned_alone(place: Path) -> None:
    save({"b": Poison()}, place)
    Poison.ran.clear()


def poisoned_by_the_system(place: Path) -> None:
    save({"a": torch.ones(2)}, place)
    (place / ".metadata").write_bytes(b"cos\nsystem\n(S'echo ran > ran'\ntR.")


def numbering_to_the_end(place: Path) -> None:
    save({"a": torch.ones(2)}, place)
    (place / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")  # 32 GiB for a memo


def numbering_in_text(place: Path) -> None:
    save({"a": torch.ones(2)}, place)
    (place / ".metadata").write_bytes(b"Np2147483647\n.")


def setting_what_is_known(place: Path) -> None:
    save({"a": torch.ones(2)}, place)
    (place / ".metadata").write_bytes(  # BUILD with a state for slots sets attributes
        b"ccollections\nCounter\n(N}S'function'\nccollections\nOrderedDict\nstb."
    )


POISONED: dict[Callable[[Path], None], str] = {
    poisoned_metadata: r"\.metadata: the pickle asks for .*, which is not among the names",
    poisoned_alone: r"\.metadata: the pickle asks for .*not among",
    poisoned_by_the_system: r"\.metadata: the pickle asks for os\.system",
    numbering_to_the_end: r"\.metadata: malformed pickle of \d+ bytes: it numbers objects",
    numbering_in_text: r"\.metadata: malformed pickle of \d+ bytes: it numbers objects",
    setting_what_is_known: r"a pickle may not set 'function'",
}


@pytest.mark.parametrize("made", POISONED)
def test_nothing_of_a_pickle_is_run(
    tmp_path: Path, made: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "dcp"
    made(place)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.open(place),
        lambda: ckpt.verify(place),
        lambda: ckpt.load({"a": torch.zeros(2)}, place, no_dist=True),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match=POISONED[made]):
            call()
    assert Poison.ran == []
    assert not (tmp_path / "ran").exists()


def test_what_a_pickle_cannot_be_trusted_with_is_left_out(tmp_path: Path) -> None:
    poisoned_value(tmp_path / "dcp")
    with ckpt.open(tmp_path / "dcp") as opened:
        assert opened.metadata == {"left_out": {"b": "builtins.getattr"}}
        assert whole(opened.state_dict())["a"].equal(torch.ones(2))
        assert list(opened.state_dict()) == ["a"]
    assert Poison.ran == []
    save({"a": torch.ones(2), "l": [{"a": 1}, Poison()]}, tmp_path / "list")
    Poison.ran.clear()
    with pytest.raises(CheckpointError, match=r"'l\.1' is builtins\.getattr, in a list"):
        ckpt.open(tmp_path / "list")
    assert Poison.ran == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_tensors_of_a_dtype_that_is_not_held_are_left_out(tmp_path: Path) -> None:
    odd = {
        "c": torch.zeros(2, dtype=torch.complex32),
        "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    place = save({"a": torch.ones(2), **odd}, tmp_path / "dcp")
    with ckpt.open(place) as opened:
        kinds = {"c": "a tensor of torch.complex32", "q": "a tensor of torch.qint8"}
        assert opened.metadata == {"left_out": kinds}
        assert list(opened.state_dict()) == ["a"]
    got = {"a": torch.zeros(2)}
    ckpt.load(got, place, no_dist=True)
    assert got["a"].equal(torch.ones(2))
    for strict in (True, False):
        with pytest.raises(LayoutMismatch, match=r"'c' was left out: .*complex32"):
            ckpt.load({"a": got["a"], "c": torch.zeros(2)}, place, no_dist=True, strict=strict)
    save(odd, tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"'c' is a tensor of torch\.complex32"):
        ckpt.open(tmp_path / "alone")
    save({"a": torch.ones(2), "l": [odd["c"]]}, tmp_path / "list")
    with pytest.raises(CheckpointError, match=r"'l\.0' is a tensor of .*, in a list"):
        ckpt.open(tmp_path / "list")


def metadata_of(place: Path) -> Metadata:
    return torch_dcp.FileSystemReader(place).read_metadata()


def write(place: Path, metadata: Metadata) -> None:
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def two(place: Path) -> Path:
    return save({"a": torch.arange(40.0), "b": torch.ones(2, 3)}, place)


def without_a_file(place: Path) -> None:
    (two(place) / "__0_0.distcp").unlink()


def cut_short(place: Path) -> None:
    file = two(place) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def overwritten(place: Path) -> None:
    file = two(place) / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))


def without_a_place(place: Path) -> None:
    metadata = metadata_of(two(place))
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "a"}
    write(place, metadata)


def without_a_chunk(place: Path) -> None:
    metadata = metadata_of(two(place))
    entry: Any = metadata.state_dict_metadata["a"]
    entry.size = torch.Size([41])
    write(place, metadata)


def with_another_folder(place: Path) -> None:
    metadata = metadata_of(two(place))
    for info in metadata.storage_data.values():
        info.relative_path = "../x"
    write(place, metadata)


def with_an_odd_name(place: Path) -> None:
    metadata = metadata_of(two(place))
    for info in metadata.storage_data.values():
        info.relative_path = "a\\b"
    write(place, metadata)


def of_another_dtype(place: Path) -> None:
    metadata = metadata_of(two(place))
    entry: Any = metadata.state_dict_metadata["a"]
    entry.properties.dtype = torch.float64
    write(place, metadata)


def cut_metadata(place: Path) -> None:
    file = two(place) / ".metadata"
    file.write_bytes(file.read_bytes()[:-20])


def no_metadata_at_all(place: Path) -> None:
    two(place)
    write(place, OrderedDict())  # pyright: ignore[reportArgumentType]


BROKEN: dict[Callable[[Path], None], tuple[type[CheckpointError], str]] = {
    without_a_file: (Corrupt, r"__0_0\.distcp: this file of the checkpoint is missing"),
    cut_short: (Corrupt, r"__0_0\.distcp: the file has \d+ bytes, \.metadata tells of \d+"),
    overwritten: (Corrupt, r"__0_0\.distcp \(bytes \d+ to \d+\): no archive of torch\.save"),
    without_a_place: (Corrupt, r"'a': nothing tells where the chunk at \[0\] lies"),
    without_a_chunk: (Corrupt, r"tensor 'a' in __0_0\.distcp: .*Fetch all files"),
    with_another_folder: (Corrupt, r"'\.\./x' is no name of a file beside"),
    with_an_odd_name: (Corrupt, r"is no name of a file beside \.metadata"),
    of_another_dtype: (Corrupt, r"'a': expected a float64 tensor of shape \(40,\), got"),
    cut_metadata: (Corrupt, r"\.metadata: malformed pickle of \d+ bytes"),
    no_metadata_at_all: (Corrupt, r"\.metadata: malformed metadata"),
}


@pytest.mark.parametrize("made", BROKEN)
def test_what_is_broken_is_named(tmp_path: Path, made: Callable[[Path], None]) -> None:
    place = tmp_path / "dcp"
    made(place)
    kind, match = BROKEN[made]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.open(place)["a"][...],
        lambda: ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=1"), []),
    )
    for call in calls:
        with pytest.raises(kind, match=match):
            call()
