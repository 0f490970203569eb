"""Checkpoints of torch_checkpointing, which its CheckpointManager made (``makers``)."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh
from dtckpt.errors import CheckpointError, Corrupt, NotCommitted

from ....dtensor.rank_meshes import run_on_mesh
from ..makers import unpacked
from ..makers.make_torch_checkpointing import FULL
from ..test_dcp import Poison, same, whole


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return what torch_checkpointing made."""
    return unpacked("torch_checkpointing-0.1.1", tmp_path)


def expected(made: Path) -> dict[str, Any]:
    return torch.load(made / "expected.pt", weights_only=False)


def test_items_with_resharders(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened = ckpt.open(made / "described")
    found = whole(opened.state_dict())
    model = expected(made)["model"]
    assert same(dict(found["model"]), model)
    assert same(found["weights"], {name: model[name] for name in found["weights"]})
    assert found["weights"].keys() == model.keys()
    assert same(found["optimizer"], expected(made)["optimizer"])
    assert found["boxes"]["columns"].equal(FULL)
    assert found["step"] == 7
    assert found["rng"]["seed"] == {0: 100, 1: 101}
    assert found["rng"]["state"][1].equal(torch.ones(4, dtype=torch.int64))
    assert opened.metadata == {"passed_over": ["config_0.json", "config_1.json"]}
    assert "passed over config_0.json" in caplog.text
    assert ckpt.verify(made / "described").problems == ()


def test_a_training_goes_on_with_another_number_of_ranks(made: Path) -> None:
    def body(mesh: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        model.register_buffer("scale", torch.zeros(3))
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer, "step": 0}
        items = ["model", "optimizer", "step"]
        ckpt.load(state, made / "described", select=items, process_group=mesh.get_group())
        assert state["step"] == 7
        assert same(dict(model.state_dict()), expected(made)["model"])
        assert same(optimizer.state_dict(), expected(made)["optimizer"])

    run_on_mesh((3,), body)


def test_files_that_say_themselves_what_they_have(made: Path, tmp_path: Path) -> None:
    found = whole(ckpt.open(made / "bare").state_dict())
    assert same(dict(found["model"]), expected(made)["model"])
    assert found["boxes"]["columns"].equal(FULL)
    ckpt.reshard(made / "bare", tmp_path / "ours", Mesh.parse("a=2"), ckpt.parse_rules("*=S(0)"))
    assert ckpt.open(tmp_path / "ours")["boxes/columns"][...].equal(FULL)


def test_files_of_one_process(made: Path) -> None:
    found = whole(ckpt.open(made / "alone").state_dict())
    assert same(found, {"model": expected(made)["model"], "step": 7})


def test_files_of_epochs_are_not_taken_for_those_of_ranks(tmp_path: Path) -> None:
    for epoch in range(3):
        torch.save({"w": torch.full((2,), float(epoch))}, tmp_path / f"epoch_{epoch}.pt")
    with pytest.raises(NotCommitted, match=r"epoch_0.pt and others may be of ranks or of steps"):
        ckpt.open(tmp_path)


def test_a_part_by_itself_is_not_taken_for_the_whole(made: Path) -> None:
    for file in ("bare/boxes_0.pt", "bare/model_0.pt"):
        with pytest.raises(CheckpointError, match="open the folder that has the files of all"):
            ckpt.open(made / file)


def remove_a_file(place: Path) -> None:
    (place / "optimizer_1.pt").unlink()


def remove_weights(place: Path) -> None:
    (place / "weights" / "rank_0.safetensors").unlink()


def swap_items(place: Path) -> None:
    (place / "model_1.pt").write_bytes((place / "boxes_1.pt").read_bytes())


def poison_the_metadata(place: Path) -> None:
    (place / "metadata.pkl").write_bytes(pickle.dumps({"version": Poison()}))


def poison_a_file(place: Path) -> None:
    torch.save({"w": Poison()}, place / "model_0.pt")


def cut_the_metadata(place: Path) -> None:
    (place / "metadata.pkl").write_bytes((place / "metadata.pkl").read_bytes()[:-100])


def edit(place: Path, change: Callable[[Any], None]) -> None:
    told = pickle.loads((place / "metadata.pkl").read_bytes())
    change(told)
    (place / "metadata.pkl").write_bytes(pickle.dumps(told))


def leave_the_folder(place: Path) -> None:
    edit(place, lambda told: layouts(told)[0].update(file_path="../rank_0.safetensors"))


def serialise_otherwise(place: Path) -> None:
    edit(
        place,
        lambda told: layouts(told)[0].update(serialization_format={"type": "JsonSerialization"}),
    )


def layouts(told: Any) -> Any:
    return told["metadata"]["weights"]["rank_to_layout_info"]


def take_another_version(place: Path) -> None:
    edit(place, lambda told: told.update(version="1.0"))


def tell_another_shape(place: Path) -> None:
    def change(told: Any) -> None:
        paths = told["metadata"]["weights"]["nested_path_to_metadata"]
        paths['["0.weight"]'][0]["sharding_metadata"]["data"]["global_shape"] = [50, 4]

    edit(place, change)


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (remove_a_file, Corrupt, "optimizer_1.pt: this file of the checkpoint is missing"),
        (remove_weights, Corrupt, "rank_0.safetensors: this file of the checkpoint is missing"),
        (swap_items, Corrupt, "model_1.pt: metadata.pkl tells of a tensor"),
        (
            poison_the_metadata,
            CheckpointError,
            "metadata.pkl: the pickle asks for builtins.getattr",
        ),
        (poison_a_file, CheckpointError, "model_0.pt: "),
        (cut_the_metadata, Corrupt, "metadata.pkl: malformed pickle"),
        (leave_the_folder, Corrupt, "'../rank_0.safetensors' is no name of a file"),
        (serialise_otherwise, CheckpointError, "is a 'JsonSerialization', which dtckpt does not"),
        (take_another_version, CheckpointError, "of version '1.0'; expected 2.0"),
        (tell_another_shape, Corrupt, r"'weights/0.weight': rank 0 has a part of shape \(3, 4\)"),
    ],
)
def test_what_is_wrong_is_told(
    made: Path, damage: Callable[[Path], None], error: type[Exception], told: str
) -> None:
    place = made / "described"
    damage(place)
    with pytest.raises(error, match=told):
        ckpt.open(place)
    assert not Poison.ran
