"""Weights of Hugging Face: opened, verified, loaded and resharded as checkpoints of ours are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh, Shard, distribute_tensor
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch, NotCommitted
from dtckpt.storage import open_store

from ...dtensor.rank_meshes import run_on_mesh
from ...ranks import run_ranks

hub: Any = importlib.import_module("huggingface_hub")  # too large to be type-checked


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed.weight": torch.randn(40, 8),
        "model.layers.0.up.weight": torch.randn(16, 8).bfloat16(),
        "model.layers.0.scale": torch.tensor(3.0),
        "model.layers.0.nothing": torch.empty(0, 4),
        "model.layers.0.blocks": torch.randint(0, 255, (4, 6), dtype=torch.uint8),
        "odd/name[0]": torch.arange(5),
        "lm_head.weight": torch.randn(40, 8),
    }


def one_file(path: Path) -> None:
    save_file(weights(), path / "model.safetensors", {"format": "pt", "made": "here"})


def of_diffusers(path: Path) -> None:
    save_file(weights(), path / "diffusion_pytorch_model.safetensors")


def several_files(path: Path) -> None:
    hub.save_torch_state_dict(weights(), path, max_shard_size=900)
    assert len(list(path.glob("*.safetensors"))) > 2


def of_torch(path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    given = {name: value for name, value in weights().items() if value.numel() and "[" not in name}
    torch_save(given, storage_writer=writer, no_dist=True)
    shards = sorted(path.glob("*.safetensors"))
    assert shards
    assert not list(path.glob("*.index.json"))


KINDS: dict[str, Callable[[Path], None]] = {
    "one": one_file,
    "diffusers": of_diffusers,
    "several": several_files,
    "of torch": of_torch,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "weights"
    made.mkdir()
    return made


def shard(path: Path, number: int, tensors: dict[str, Tensor], **starts: Any) -> None:
    """Write the file of a rank as torch's writer does, with where its tensors begin."""
    told = json.dumps({name: {"saved_offsets": at} for name, at in starts.items()})
    name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
    save_file(tensors, path / name, {"DCP_SHARDING_INFO": told, "DCP_VERSION": "1.0"})


@pytest.mark.filterwarnings("ignore")  # of torch's own
@pytest.mark.parametrize("kind", KINDS)
def test_what_they_save_is_a_checkpoint(place: Path, kind: str) -> None:
    KINDS[kind](place)
    wanted = {
        name: value
        for name, value in weights().items()
        if kind != "of torch" or (value.numel() and "[" not in name)
    }
    with ckpt.open(place) as opened:
        found = opened.state_dict()
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            assert found[name][...].equal(value)
        assert opened["model.embed.weight"][3:5, 1].equal(wanted["model.embed.weight"][3:5, 1])
    report = ckpt.verify(place)
    assert report.problems == ()
    assert not report.has_checksums
    assert report.num_tensors == len(wanted)
    into = {name: torch.full_like(value, 7) for name, value in wanted.items()}
    told = ckpt.load(into, place, no_dist=True)
    assert all(into[name].equal(value) for name, value in wanted.items())
    assert told.bytes_read == sum(value.nbytes for value in wanted.values())


@pytest.mark.parametrize("kind", ["one", "several"])
def test_each_rank_reads_what_it_holds_and_no_more(place: Path, kind: str) -> None:
    KINDS[kind](place)
    whole = weights()["model.embed.weight"]

    def body(mesh: Any) -> tuple[int, int]:
        into = {"model.embed.weight": distribute_tensor(torch.zeros(40, 8), mesh, [Shard(0)])}
        told = ckpt.load(into, place, strict=False, process_group=mesh.get_group())
        assert into["model.embed.weight"].full_tensor().equal(whole)
        return told.bytes_read, told.bytes_needed

    for read, needed in run_on_mesh((4,), body):
        assert read == needed == whole.nbytes // 4


def test_parts_of_a_tensor_lie_in_several_files(place: Path) -> None:
    whole, small = torch.randn(6, 4), torch.randn(3)
    shard(place, 1, {"w": whole[:4].clone(), "b": small}, w=[0, 0], b=[0])
    shard(place, 2, {"w": whole[4:].clone()}, w=[4, 0])
    opened = ckpt.open(place)
    assert opened["w"][...].equal(whole)
    assert opened["w"][3:5].equal(whole[3:5])
    assert opened["b"][...].equal(small)
    assert ckpt.verify(place).problems == ()


def of_three_ranks(path: Path) -> Tensor:
    whole = torch.arange(24.0).view(6, 4)
    for rank in range(3):
        part = whole[2 * rank : 2 * rank + 2].clone()
        shard(path, rank + 1, {"w": part, f"b{rank}": torch.ones(2)}, w=[2 * rank, 0])
    return whole


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_without_a_file_is_named(place: Path, number: int) -> None:
    of_three_ranks(place)
    name = f"shard-0000{number}-model-00001-of-00001.safetensors"
    (place / name).unlink()
    for call in (ckpt.open, ckpt.verify):
        with pytest.raises(Corrupt, match=rf"{name} is missing, though there is shard-00003"):
            call(place)
    save_file({}, place / name)  # as the error recommends where a rank had nothing
    with pytest.raises(Corrupt, match=r"tensor 'w' in .*Fetch all files"):
        ckpt.open(place)


def test_a_rank_that_had_nothing_to_save(place: Path) -> None:
    shard(place, 1, {"w": torch.ones(2, 4)}, w=[0, 0])
    shard(place, 3, {"w": torch.zeros(2, 4)}, w=[2, 0])
    with pytest.raises(Corrupt, match="put a safetensors file of that name without tensors there"):
        ckpt.open(place)
    save_file({}, place / "shard-00002-model-00001-of-00001.safetensors")
    assert ckpt.open(place)["w"][...].equal(torch.cat([torch.ones(2, 4), torch.zeros(2, 4)]))


def test_the_last_ranks_may_be_missing_which_is_said(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = of_three_ranks(place)
    assert ckpt.open(place)["w"][...].equal(whole)
    (place / "shard-00003-model-00001-of-00001.safetensors").unlink()
    caplog.clear()
    (note,) = ckpt.verify(place).notes
    assert "these are of 2" in note
    assert "shard-00002-model-00001-of-00001.safetensors is the last" in caplog.text + note
    assert ckpt.open(place).metadata["unsure"] == note
    into = {"w": torch.full((6, 4), 7.0)}
    with pytest.raises(LayoutMismatch):
        ckpt.load(into, place, no_dist=True)
    assert into["w"].eq(7).all()


def test_the_file_of_one_rank_is_no_checkpoint(place: Path) -> None:
    of_three_ranks(place)
    for file in sorted(place.iterdir()):
        with pytest.raises(Corrupt, match=r"the file of one rank, .*Open the directory"):
            ckpt.open(file)
    alone = place / "shard-00002-model-00001-of-00001.safetensors"
    for file in sorted(place.iterdir()):
        if file != alone:
            file.unlink()
    with pytest.raises(Corrupt, match="those of the ranks before it are missing"):
        ckpt.open(alone)


def test_what_lies_beside_the_weights_is_told(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the Trainer and accelerate leave it; each may be opened by its own path."""
    save_file({"w": torch.ones(3)}, place / "model.safetensors")
    save_file({"v": torch.zeros(3)}, place / "model_1.safetensors")
    torch.save({"w": torch.ones(3)}, place / "pytorch_model.bin")  # the same in another form
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, place / "optimizer.pt")
    torch.save({"last_epoch": 3}, place / "scheduler.bin")
    torch.save({"cpu": torch.get_rng_state()}, place / "rng_state.pth")
    for name in ("config.json", "README.md", "tokenizer.json", "merges.txt", ".gitattributes"):
        (place / name).write_text("{}")
    (place / "trainer_state.json").write_text('{"global_step": 5}')
    (place / "global_step5").mkdir()
    wanted = [
        *("global_step5/", "model_1.safetensors", "optimizer.pt", "rng_state.pth"),
        *("scheduler.bin", "trainer_state.json"),
    ]
    with ckpt.open(place) as opened:
        assert list(opened) == ["w"]
        assert opened.metadata["passed_over"] == wanted
    assert f"passed over {', '.join(wanted)}, which may be opened" in caplog.text
    assert ckpt.verify(place).notes == (
        f"passed over {', '.join(wanted)}, which may be opened by their own paths",
    )
    optimizer = ckpt.open(place / "optimizer.pt").state_dict()
    assert optimizer["state"][0]["exp_avg"][...].equal(torch.ones(2))
    assert ckpt.open(place / "scheduler.bin").state_dict() == {"last_epoch": 3}
    ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=1"), ckpt.parse_rules("*=R"))
    assert ckpt.open(tmp_path / "ours").metadata["passed_over"] == wanted


def test_an_index_of_another_program(place: Path) -> None:
    """With a BOM, of files in folders, and not of all tensors that they have."""
    (place / "sub").mkdir()
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, place / "sub/x.safetensors")
    index = json.dumps({"weight_map": {"a": "sub/x.safetensors"}})
    (place / "model.safetensors.index.json").write_text(index, encoding="utf-8-sig")
    with ckpt.open(place) as opened:
        assert list(opened) == ["a"]
        assert opened["a"][...].equal(torch.ones(2))
        told = "a tensor of sub/x.safetensors that the index does not name"
        assert opened.metadata["left_out"] == {"b": told}
    for name in ("../x.safetensors", "/x.safetensors", "sub//x.safetensors"):
        rewrite(place, {"weight_map": {"a": name}})
        with pytest.raises(Corrupt, match="no name of a file beside the index"):
            ckpt.open(place)


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"format": "pt", "b": "a"}, ["a", "b"]),
        ({"format": "pt", "note": "mine", "lm.head": "a"}, ["a", "lm.head"]),
        ({"format": "pt", "note": "mine", "architecture": "a"}, ["a"]),
        ({"title": "a"}, ["a"]),
        ({"format": "mlx", "b.c": "a"}, ["a"]),
    ],
)
def test_metadata_that_happens_to_name_a_tensor_ties_none(
    place: Path, metadata: dict[str, str], names: list[str]
) -> None:
    save_file({"a": torch.ones(2)}, place / "model.safetensors", metadata)
    assert list(ckpt.open(place)) == names


def test_a_file_of_an_epoch_is_none_of_a_rank(place: Path) -> None:
    torch.save({"w": torch.ones(2)}, place / "epoch_0.pt")
    with pytest.raises(NotCommitted, match=r"files of tensors \(epoch_0\.pt\)\. Give the path"):
        ckpt.open(place)
    assert ckpt.open(place / "epoch_0.pt")["w"][...].equal(torch.ones(2))


def test_modules_are_filled_by_another_name(place: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    save_file(model.state_dict(), place / "model.safetensors")
    into = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))

    def body(_rank: int, group: Any) -> None:
        ckpt.load({"model": into}, place, rename={"model": ""}, process_group=group)

    run_ranks(1, body)
    for name, value in model.state_dict().items():
        assert into.state_dict()[name].equal(value)


@pytest.mark.parametrize("kind", ["one", "several"])
def test_they_become_checkpoints_of_ours(place: Path, tmp_path: Path, kind: str) -> None:
    KINDS[kind](place)
    target = tmp_path / "ours"
    ckpt.reshard(place, target, Mesh.parse("a=2"), ckpt.parse_rules("*.weight=S(0)"))
    report = ckpt.verify(target)
    assert report.problems == ()
    assert report.has_checksums
    ours = ckpt.open(target).state_dict()
    for name, value in weights().items():
        assert ours[name][...].equal(value)


def test_four_bit_numbers_stay_as_they_are(place: Path) -> None:
    bits = torch.arange(24, dtype=torch.uint8).view(4, 6)
    save_file({"w": bits.view(torch.float4_e2m1fn_x2)}, place / "model.safetensors")
    opened = ckpt.open(place)
    assert opened["w"].shape == (4, 6)
    assert opened["w"][1:3].view(torch.uint8).equal(bits[1:3])


def indexed(path: Path) -> dict[str, Any]:
    several_files(path)
    return json.loads((path / "model.safetensors.index.json").read_text())


def rewrite(path: Path, index: dict[str, Any]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def without_a_file(path: Path) -> None:
    index = indexed(path)
    (path / index["weight_map"]["lm_head.weight"]).unlink()


def with_a_name_too_many(path: Path) -> None:
    index = indexed(path)
    index["weight_map"]["more"] = index["weight_map"]["lm_head.weight"]
    rewrite(path, index)


def with_another_folder(path: Path) -> None:
    index = indexed(path)
    index["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    rewrite(path, index)


def without_a_map(path: Path) -> None:
    rewrite(path, {"metadata": {}})


def with_no_json(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{")


def cut_short(path: Path) -> None:
    one_file(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def with_more_behind(path: Path) -> None:
    one_file(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"12345")


def of_no_tensors(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"PK\x03\x04 this is a zip file, and a long one")


def nearly_empty(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00")


def header(path: Path, told: dict[str, Any], data: bytes) -> None:
    text = json.dumps(told).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def with_a_hole(path: Path) -> None:
    header(path, {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5))


def overlapping(path: Path) -> None:
    header(path, {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3))


def of_another_length(path: Path) -> None:
    header(path, {"a": entry("F32", [2], 0, 4)}, bytes(4))


def of_an_unknown_dtype(path: Path) -> None:
    header(path, {"a": entry("F7", [2], 0, 2)}, bytes(2))


def without_a_part(path: Path) -> None:
    shard(path, 1, {"w": torch.ones(4, 4)}, w=[0, 0])
    shard(path, 2, {"w": torch.ones(1, 4)}, w=[5, 0])


def with_parts_twice(path: Path) -> None:
    shard(path, 1, {"w": torch.ones(4, 4)}, w=[0, 0])
    shard(path, 2, {"w": torch.ones(4, 4)}, w=[2, 0])


def with_two_of_a_name(path: Path) -> None:
    for number in (1, 2):
        save_file({"w": torch.ones(3)}, path / f"model-0000{number}-of-00002.safetensors")


def with_parts_of_two_dtypes(path: Path) -> None:
    shard(path, 1, {"w": torch.ones(4)}, w=[0])
    shard(path, 2, {"w": torch.ones(4).double()}, w=[4])


def half_of_it(path: Path) -> None:
    save_file({"w": torch.ones(3)}, path / "model-00001-of-00002.safetensors")


def of_two_saves(path: Path) -> None:
    half_of_it(path)
    save_file({"v": torch.ones(3)}, path / "model-00001-of-00001.safetensors")


def with_no_name(path: Path) -> None:
    rewrite(path, {"weight_map": {"w": ""}})


def with_an_odd_name(path: Path) -> None:
    rewrite(path, {"weight_map": {"w": "a\\b.safetensors"}})


BROKEN: dict[Callable[[Path], Any], str] = {
    half_of_it: r"1 of 2 files of weights are here, and no index \(there are numbers 1\)\. Fetch",
    of_two_saves: r"files of saves in 1 and in 2 files lie here, and no index\. Remove",
    with_no_name: r"index\.json: '' is no name of a file beside the index",
    with_an_odd_name: r"is no name of a file beside the index",
    without_a_file: r"model-0000\d-of-0000\d\.safetensors: this file of the checkpoint is missing",
    with_a_name_too_many: r"the index names tensor 'more' in model-",
    with_another_folder: r"'\.\./secret\.safetensors' is no name of a file beside the index",
    without_a_map: r"index\.json: malformed index: KeyError\('weight_map'\)",
    with_no_json: r"index\.json: malformed JSON",
    cut_short: r"the file has \d+ bytes, its header describes \d+; it is truncated",
    with_more_behind: r"the file has \d+ bytes, its header describes \d+",
    of_no_tensors: r"model\.safetensors is a file of torch\.save or another zip archive",
    nearly_empty: r"6 bytes are no safetensors file",
    with_a_hole: r"'b' of 2 bytes lies at 3 to 5, expected it at 2",
    overlapping: r"'b' of 2 bytes lies at 1 to 3, expected it at 2",
    of_another_length: r"'a' of 8 bytes lies at 0 to 4, expected it at 0",
    of_an_unknown_dtype: r"'a': unknown dtype 'F7'",
    without_a_part: r"tensor 'w' in shard-00001.*, shard-00002.*Fetch all files",
    with_parts_twice: r"tensor 'w' in .*overlap",
    with_two_of_a_name: r"tensor 'w' is in model-00001.*, model-00002.*Remove the files",
    with_parts_of_two_dtypes: r"tensor 'w' is in shard-00001.*parts of it",
}


@pytest.mark.parametrize("made", BROKEN)
def test_what_is_broken_is_named(place: Path, made: Callable[[Path], Any]) -> None:
    made(place)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.open(place),
        lambda: ckpt.verify(place),
        lambda: ckpt.load({"w": torch.zeros(3)}, place, no_dist=True),
    )
    for call in calls:
        with pytest.raises(Corrupt, match=BROKEN[made]):
            call()


def test_files_of_other_names_are_told(place: Path) -> None:
    save_file({"w": torch.ones(3)}, place / "weights.safetensors")
    torch.save({"w": torch.ones(3)}, place / "state.pt")
    with pytest.raises(NotCommitted, match=r"\(state\.pt, weights\.safetensors\)\. Give the path"):
        ckpt.open(place)


def test_no_header_makes_a_reader_take_memory(place: Path) -> None:
    (place / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with (place / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 41)  # sparse
    with pytest.raises(CheckpointError, match="DTCKPT_METADATA_MIB"):
        ckpt.open(place)


def test_a_file_that_is_replaced_meanwhile_is_noticed(place: Path) -> None:
    one_file(place)
    opened = ckpt.open(place)
    wanted = load_file(place / "model.safetensors")
    wanted["model.layers.0.scale2"] = wanted.pop("model.layers.0.scale")
    save_file(wanted, place / "model.safetensors")
    with pytest.raises(Corrupt, match=r"was replaced|bytes, expected"):
        opened["lm_head.weight"][...]


def test_a_manifest_on_disk_cannot_pass_itself_off_as_another_format(place: Path) -> None:
    one_file(place)
    text = ckpt.read_manifest(open_store(place)).to_bytes()
    (place / "manifest.json").write_bytes(text)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.open(place),
        lambda: ckpt.load({"w": torch.zeros(3)}, place, no_dist=True),
    )
    for call in calls:
        with pytest.raises(Corrupt, match="not a dtckpt manifest"):
            call()


def test_a_tensor_that_no_checkpoint_holds_is_only_missing(place: Path) -> None:
    save_file({"a": torch.ones(3)}, place / "model.safetensors")
    into = {"a": torch.zeros(3), "b": torch.eye(3).to_sparse()}
    told = ckpt.load(into, place, strict=False, no_dist=True)
    assert told.missing == ("b",)
    assert into["a"].equal(torch.ones(3))


class Tied(torch.nn.Module):
    """An output layer that is the embedding, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_model_ties_need_not_be_there(place: Path, device: str) -> None:
    weight = torch.randn(7, 3)
    save_file({"embed.weight": weight}, place / "model.safetensors")
    with torch.device(device):
        model = Tied()
    told = ckpt.load({"model": model}, place, rename={"model": ""}, no_dist=True)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.equal(weight)
    assert told.missing == ()
    assert told.tied == {"head.weight": "embed.weight"}
    assert "tied to what is: head.weight" in str(told)
    with torch.device(device):
        state = Tied().state_dict()
    into = {"model": dict(state)}
    ckpt.load(into, place, rename={"model": ""}, no_dist=True)
    assert into["model"]["head.weight"].equal(weight)
    assert into["model"]["embed.weight"].data_ptr() == into["model"]["head.weight"].data_ptr()


def test_what_is_not_tied_has_to_be_there(place: Path) -> None:
    save_file({"embed.weight": torch.randn(7, 3)}, place / "model.safetensors")
    model = Tied()
    model.head.weight = torch.nn.Parameter(torch.randn(7, 3))
    before = model.embed.weight.clone()
    with pytest.raises(LayoutMismatch, match=r"Missing in the checkpoint: head\.weight"):
        ckpt.load({"model": model}, place, rename={"model": ""}, no_dist=True)
    assert model.embed.weight.equal(before)


def test_ties_are_found_alike_on_ranks_that_hold_nothing(place: Path) -> None:
    weight = torch.randn(2, 3)
    save_file({"a": weight}, place / "model.safetensors")

    def body(mesh: Any) -> None:
        tensor = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)])  # two ranks hold no row
        told = ckpt.load({"a": tensor, "b": tensor}, place, process_group=mesh.get_group())
        assert told.tied == {"b": "a"}
        assert tensor.full_tensor().equal(weight)

    run_on_mesh((4,), body)


def test_ranks_with_different_files_whose_headers_are_alike_are_told(place: Path) -> None:
    for number in (0, 1):
        (place / f"{number}").mkdir()
        save_file({"w": torch.full((3,), float(number))}, place / f"{number}/model.safetensors")

    def load(rank: int, group: Any) -> None:
        into = {"w": torch.full((3,), -1.0)}
        with pytest.raises(LayoutMismatch, match=r"files without checksums, perhaps others, is"):
            ckpt.load(into, place / f"{rank}", process_group=group)
        assert into["w"].equal(torch.full((3,), -1.0))

    run_ranks(2, load)
