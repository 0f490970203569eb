"""transformers' Trainer saves, is killed, and resumes by dtckpt, under tensor parallelism, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dtckpt.checkpoint as ckpt

from ..frameworks.tiny_models import write_pretrained
from ..processes import run_processes
from . import flip_a_bit, needs, run_page

pytestmark = needs("transformers")

TP = {"tp_size": 2}
BOTH = {"tp_size": 2, "fsdp_size": 2}
CROSSINGS = (("tp", "tp"), ("tp", "one"), ("tp", "both"), ("both", "tp"), ("ddp", "tp"))
"""Meshes that train the first steps, and those that go on."""
MESHES: dict[str, Any] = {"one": None, "tp": TP, "both": BOTH, "ddp": None}


def fits(size: int, *trainings: dict[str, Any]) -> Any:
    """Run trainings one after the other and return what rank 0 tells of each."""
    text = run_processes("tests.integrations.transformers_ranks", size, json.dumps(trainings))[0]
    return json.loads(next(line for line in text.splitlines() if line.startswith('[{"losses')))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transformers")
    write_pretrained(path)
    return path


def training(folder: Path, name: str, mesh: str, **told: Any) -> dict[str, Any]:
    model = str(folder / "qwen3-moe")
    size = {"size": 2} if mesh == "ddp" else {}
    return {"folder": f"{folder}/{name}", "model": model, "mesh": MESHES[mesh], **size, **told}


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """What trainings give that nothing interrupts, and those that go on elsewhere."""
    runs = {"whole": training(folder, "whole", "tp", keep=3)}
    for mesh in MESHES:
        runs[mesh] = training(folder, mesh, mesh, stop=4, background=True, keep=1)
    for first, second in CROSSINGS:
        name = f"{first}-{second}"
        runs[name] = training(folder, name, second, resume=f"{folder}/{first}")
    return dict(zip(runs, fits(4, *runs.values()), strict=True))


@pytest.mark.parametrize(("first", "second"), CROSSINGS)
def test_a_training_goes_on_on_another_mesh(
    done: dict[str, Any], folder: Path, first: str, second: str
) -> None:
    losses = done["whole"]["losses"]
    assert len(set(losses)) == 8
    assert done[first]["losses"] == pytest.approx(losses[:4], rel=1e-5)
    assert done[first]["saved"] == ["checkpoint-4"]
    resumed = done[f"{first}-{second}"]
    assert resumed["losses"] == pytest.approx(losses, rel=1e-5)
    if first == second == "tp":
        assert resumed["losses"] == losses, "the same mesh gives the same bits"
    assert ckpt.verify(folder / first / "checkpoint-4").problems == ()


def test_tensor_parallel_ranks_are_killed_and_resume_from_what_is_intact(
    done: dict[str, Any], folder: Path
) -> None:
    run = training(folder, "killed", "tp", background=True)
    with pytest.raises(AssertionError):
        fits(2, run | {"kill": 7})
    place = folder / "killed"
    flip_a_bit(place / "checkpoint-4")
    (place / "checkpoint-6" / "manifest.json").unlink(missing_ok=True)
    (resumed,) = fits(2, run | {"resume": str(place)})
    assert resumed["from"] == "checkpoint-2"
    assert resumed["losses"] == done["whole"]["losses"]


def test_old_checkpoints_are_removed(done: dict[str, Any], folder: Path) -> None:
    assert done["whole"]["saved"] == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert sorted(path.name for path in (folder / "whole").iterdir()) == done["whole"]["saved"]


def test_progress_and_configuration_are_restored_from_the_checkpoint(
    done: dict[str, Any], folder: Path
) -> None:
    """The file with the progress is of the Trainer and has no checksum: ours counts."""
    path = folder / "whole" / "checkpoint-8"
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3_moe"
    with ckpt.open(path) as checkpoint:
        saved = json.loads(bytes(checkpoint["trainer_state"][...].tolist()))
    assert saved["global_step"] == 8
    assert json.loads((path / "trainer_state.json").read_text()) == saved


def test_weights_are_exported_for_from_pretrained(done: dict[str, Any], folder: Path) -> None:
    path = folder / "tp" / "checkpoint-4"
    report = ckpt.export(path, folder / "exported", part="model")
    assert len(report.files) >= 1


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("transformers", tmp_path)


def test_a_checkpoint_of_the_model_alone_is_resumed_with_its_weights(tmp_path: Path) -> None:
    run_processes("tests.integrations.save_only_model_ranks", 1, str(tmp_path))


def test_buffers_of_ddp_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run_processes("tests.integrations.trainer_buffers_ranks", 2, str(tmp_path))
