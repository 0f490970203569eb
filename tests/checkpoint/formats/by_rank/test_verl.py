"""Checkpoints of verl: files that its manager made, and files made by the calls that it makes.

Those in ``tests/data`` are of its FSDPCheckpointManager (0.9.1, ``makers/make_verl.py``), which
saves ``model.state_dict()`` and ``optimizer.state_dict()`` of each rank by ``torch.save``. The
others are of that call, on meshes that would need many processes.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh, distribute_tensor
from dtckpt.dtensor import Shard as OurShard
from dtckpt.errors import CheckpointError, Corrupt
from tests.in_turn import in_turn

from ....dtensor.rank_meshes import run_on_mesh
from ..makers import unpacked
from ..test_dcp import Poison, same, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


class Tiny(nn.Module):
    """The modules of the model in ``makers/make_verl.py``."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("scale", torch.zeros(3))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return what verl made."""
    return unpacked("verl-0.9.1", tmp_path / "step")


def expected(made: Path) -> dict[str, Any]:
    return torch.load(made / "expected.pt", weights_only=False)


def test_what_verl_saved_is_one_state(made: Path) -> None:
    found = whole(ckpt.open(made).state_dict())
    assert same(dict(found["model"]), expected(made)["model"])
    assert same(found["optim"], expected(made)["optim"])
    assert ckpt.verify(made).problems == ()


def test_what_differs_is_kept_for_each_rank(made: Path) -> None:
    told = ckpt.open(made).state_dict()["extra_state"]
    assert told["lr_scheduler"]["last_epoch"] == 1
    state = torch.get_rng_state()
    for rank in range(2):
        torch.manual_seed(100 + rank)
        assert told["rng"]["cpu"][rank][...].equal(torch.get_rng_state())
        assert told["rng"]["random"][rank] != told["rng"]["random"][1 - rank]
    torch.set_rng_state(state)


def test_shards_of_the_older_fsdp(made: Path) -> None:
    found = whole(ckpt.open(made / "fsdp1").state_dict())
    assert same(dict(found["model"]), expected(made)["fsdp1"])


@pytest.mark.parametrize("size", [1, 3])
def test_a_training_goes_on_with_another_number_of_ranks(made: Path, size: int) -> None:
    def body(mesh: Any) -> None:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        state = {"model": model, "optim": optimizer, "extra_state": {"lr_scheduler": scheduler}}
        parts = ["model", "optim", "extra_state/lr_scheduler"]
        ckpt.load(state, made, select=parts, process_group=mesh.get_group())
        assert scheduler.last_epoch == 1
        assert same(dict(model.state_dict()), expected(made)["model"])
        assert same(optimizer.state_dict(), expected(made)["optim"])

    run_on_mesh((size,), body)


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    full = torch.randn(64, 32)

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        part = DTensor.from_local(full.chunk(4)[rank].clone(), mesh, [Shard(0)], run_check=False)
        torch.save({"w": part}, tmp_path / f"model_world_size_4_rank_{rank}.pt")

    in_turn(4, save)

    def body(mesh: Any) -> int:
        into = {"model": {"w": distribute_tensor(torch.zeros(64, 32), mesh, [OurShard(0)])}}
        told = ckpt.load(into, tmp_path, process_group=mesh.get_group())
        assert into["model"]["w"].full_tensor().equal(full)
        return told.bytes_read

    assert run_on_mesh((2,), body) == [full.nbytes // 2] * 2
    ckpt.reshard(tmp_path, tmp_path / "ours", Mesh.parse("a=3"), ckpt.parse_rules("*=S(0)"))
    assert ckpt.open(tmp_path / "ours")["model/w"][...].equal(full)


MESHES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "cut unevenly": ((3,), [Shard(0)]),
    "more ranks than columns": ((8,), [Shard(1)]),
    "columns": ((4,), [Shard(1)]),
    "replicated": ((2, 2), [Replicate(), Shard(0)]),
    "both dims": ((2, 2), [Shard(0), Shard(1)]),
    "cut twice": ((2, 2), [Shard(0), Shard(0)]),
    "from right to left": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "packed": ((2,), [_StridedShard(1, split_factor=3)]),
    "whole": ((2,), [Replicate()]),
}


@pytest.mark.parametrize("name", MESHES)
def test_layouts_of_dtensors(tmp_path: Path, name: str) -> None:
    shape, placements = MESHES[name]
    full = torch.arange(48.0).view(8, 6)

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
        local = local_of(full, mesh, placements)
        given = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        state = {"w": given, "tied": given, "empty": torch.empty(0, 6), "step": torch.tensor(3.0)}
        size = mesh.size()
        torch.save(state, tmp_path / f"model_world_size_{size}_rank_{rank}.pt")

    in_turn(torch.Size(shape).numel(), save)
    opened = ckpt.open(tmp_path)
    assert opened["model/w"][...].equal(full)
    assert opened.manifest.tensors["model/tied"].same_as == "model/w"
    assert opened["model/empty"].shape == (0, 6)
    assert opened["model/step"][...] == 3
    assert ckpt.verify(tmp_path).problems == ()


def local_of(full: Tensor, mesh: Any, placements: list[Any]) -> Tensor:
    """Return what a rank holds, by torch's own cuts."""
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(full, mesh.size(axis), with_padding=False)
            full = parts[mesh.get_coordinate()[axis]]
    return full.clone()


def test_a_part_of_a_larger_mesh_and_views(tmp_path: Path) -> None:
    full = torch.arange(24.0).view(4, 6)

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage, half = mesh.get_coordinate() or (0, 0)
        local = full.chunk(2)[half].T.contiguous().T  # not in row-major order
        given = DTensor.from_local(local, mesh["dp"], [Shard(0)], run_check=False)
        torch.save({f"{stage}.w": given}, tmp_path / f"model_world_size_4_rank_{rank}.pt")

    in_turn(4, save)
    opened = ckpt.open(tmp_path)
    assert opened["model/0.w"][...].equal(full)
    assert opened["model/1.w"][...].equal(full)
    assert [t.layout.all_ranks() for t in opened.manifest.tensors.values()] == [(0, 1), (2, 3)]


def test_checksums_that_torch_was_told_to_leave_out(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for rank in range(2):
            state = {"same": torch.ones(3), "own": torch.full((2,), float(rank))}
            torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    told = ckpt.open(tmp_path).state_dict()["model"]
    assert told["same"][...].equal(torch.ones(3))
    assert told["own"][1][...].equal(torch.ones(2))


def remove_a_file(place: Path) -> None:
    (place / "optim_world_size_2_rank_1.pt").unlink()


def remove_a_rank(place: Path) -> None:
    for file in place.glob("*_rank_1.pt"):
        file.rename(str(file).replace("_rank_1", "_rank_2"))


def mix_runs(place: Path) -> None:
    torch.save({}, place / "model_world_size_4_rank_3.pt")


def cut_short(place: Path) -> None:
    file = place / "model_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[:-50])


def put_code(place: Path) -> None:
    torch.save({"w": Poison()}, place / "model_world_size_2_rank_1.pt")


def put_many_names(place: Path) -> None:
    names = b"".join(b"cmodule\nname%d\n0" % i for i in range(10_000))
    put_pickle(place, b"\x80\x02" + names + b"N.")


def put_pickle(place: Path, data: bytes) -> None:
    file = place / "model_world_size_2_rank_1.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", data)


def put_a_factor(place: Path) -> None:
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        spread = [_StridedShard(0, split_factor=1 << 40)]
        part = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False)
        part._spec.placements = tuple(spread)
        torch.save({"w": part}, place / f"model_world_size_2_rank_{rank}.pt")

    in_turn(2, save)


def put_another_shape(place: Path) -> None:
    torch.save(OrderedDict({"norm.bias": torch.ones(2)}), place / "model_world_size_2_rank_0.pt")


def put_a_tensor_in_a_dicts_place(place: Path) -> None:
    torch.save(torch.ones(2), place / "model_world_size_2_rank_0.pt")


def lose_tensors(place: Path) -> None:
    scale = OrderedDict({"scale": torch.arange(3.0)})
    torch.save(scale, place / "model_world_size_2_rank_1.pt")


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (remove_a_file, Corrupt, "have saved 'optim' .* file of rank 1 is missing"),
        (remove_a_rank, Corrupt, "file of rank 1 is missing"),
        (mix_runs, Corrupt, "files of 2 and of 4 ranks lie side by side"),
        (cut_short, Corrupt, "model_world_size_2_rank_1.pt.*no archive of torch.save"),
        (put_code, CheckpointError, "rank_1.pt: the pickle asks for builtins.getattr"),
        (put_many_names, CheckpointError, "the pickle asks for module.name100, which"),
        (put_a_factor, Corrupt, "rank_0.pt: malformed pickle .*a split factor is"),
        (put_another_shape, CheckpointError, "'model/norm.bias' is not laid out alike"),
        (put_a_tensor_in_a_dicts_place, CheckpointError, "'model' is not of one kind in .*rank_1"),
        (lose_tensors, Corrupt, "'model/embed.weight' lies on the ranks of .*no file of rank 1"),
    ],
)
def test_what_is_wrong_is_told(
    made: Path, damage: Callable[[Path], None], error: type[Exception], told: str
) -> None:
    damage(made)
    with pytest.raises(error, match=told):
        ckpt.open(made)
    assert not Poison.ran
