"""torchtitan's checkpoint manager by dtckpt, with its optimizers, schedules and base class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import dtckpt.checkpoint as ckpt

from ..processes import run_processes
from . import flip_a_bit, needs, run_page

pytestmark = needs("torchtitan")


def trainings(size: int, *told: dict[str, Any]) -> Any:
    """Run trainings one after the other and return what rank 0 tells of each."""
    text = run_processes("tests.integrations.torchtitan_ranks", size, json.dumps(told))[0]
    return json.loads(next(line for line in text.splitlines() if line.startswith("[{")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """What trainings give, one after the other, some of them in the folders of earlier ones."""
    hf = {"last_save_in_hf": True, "export_dtype": "bfloat16"}
    weights = f"{folder}/hf/checkpoint/step-3"
    from_hf = {"initial_load_in_hf": True, "initial_load_path": weights}
    one_of = {"initial_load_path": f"{folder}/mesh/checkpoint/step-4"}
    runs: dict[str, dict[str, Any]] = {
        "whole": {"folder": "whole", "config": {"keep_latest_k": 2}},
        "begun": {"folder": "mesh", "mesh": [2, 2], "until": 4},
        "resumed": {"folder": "mesh", "mesh": [1, 2], "config": {"keep_latest_k": 3}},
        "refused": {"folder": "mesh", "mesh": [2, 1], "error": "dataloader/dp_rank_1"},
        "earlier": {
            "folder": "mesh",
            "mesh": [2, 1],
            "load_step": 6,
            "config": {"load_only": True, "exclude_from_loading": ["dataloader"]},
        },
        "without": {
            "folder": "mesh",
            "load_step": 6,
            "until": 7,
            "config": {"exclude_from_loading": ["dataloader", "lr_scheduler"]},
        },
        "long": {"folder": "back", "config": {"keep_latest_k": 0}},
        "back": {"folder": "back", "load_step": 2, "until": 4, "config": {"keep_latest_k": 2}},
        "after": {"folder": "back", "until": 4},
        "hf": {"folder": "hf", "mesh": [1, 2], "until": 3, "last": 3, "config": hf},
        "from hf": {"folder": "hf2", "mesh": [2, 1], "until": 1, "config": from_hf},
        "from one": {"folder": "one", "until": 1, "config": one_of},
        "last": {"folder": "last", "until": 2, "last": 2, "config": {"async_save": False}},
        "in vain": {"folder": "last", "error": "Missing in the checkpoint: train_state"},
    }
    for told in runs.values():
        told["folder"] = f"{folder}/{told['folder']}"
    return dict(zip(runs, trainings(4, *runs.values()), strict=True))


def test_a_training_goes_on_on_another_mesh(done: dict[str, Any]) -> None:
    losses = done["whole"]["losses"]
    assert len(losses) == 8
    assert done["begun"]["losses"] == pytest.approx(losses[:4], rel=1e-4)
    assert done["resumed"]["begun"] == 4
    assert done["resumed"]["losses"] == pytest.approx(losses[4:], rel=1e-4)


def test_a_step_can_be_chosen_and_nothing_is_saved_by_load_only(done: dict[str, Any]) -> None:
    assert done["earlier"]["begun"] == 6
    assert done["earlier"]["losses"] == pytest.approx(done["whole"]["losses"][6:], rel=1e-4)
    assert done["earlier"]["saved"] == done["resumed"]["saved"]


def test_parts_are_left_out(done: dict[str, Any]) -> None:
    assert done["without"]["begun"] == 6
    assert done["without"]["losses"] == pytest.approx(done["whole"]["losses"][6:7], rel=1e-4)


def test_the_latest_are_kept(done: dict[str, Any]) -> None:
    assert done["whole"]["saved"] == ["step-6", "step-8"]
    assert done["resumed"]["saved"] == ["step-4", "step-6", "step-8"]


def test_a_run_that_has_gone_back_goes_on_from_there(done: dict[str, Any]) -> None:
    assert done["long"]["saved"] == ["step-2", "step-4", "step-6", "step-8"]
    assert done["back"]["begun"] == 2
    assert done["back"]["saved"] == ["step-2", "step-4"]
    assert done["after"]["begun"] == 4


def test_the_last_weights_are_those_of_hugging_face(done: dict[str, Any], folder: Path) -> None:
    assert done["hf"]["saved"] == ["step-2", "step-3"]
    weights = load_file(folder / "hf" / "checkpoint" / "step-3" / "model.safetensors")
    assert sorted(weights) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
    assert {str(value.dtype) for value in weights.values()} == {"torch.bfloat16"}
    assert done["from hf"]["loaded"]
    assert done["from hf"]["begun"] == 0, "weights only"
    assert done["from hf"]["losses"][0] != pytest.approx(done["whole"]["losses"][0], rel=1e-3)


def test_a_training_begins_with_weights_of_another(done: dict[str, Any]) -> None:
    assert done["from one"]["loaded"]
    assert done["from one"]["begun"] == 0


def test_the_last_checkpoint_has_the_model_alone(done: dict[str, Any], folder: Path) -> None:
    with ckpt.open(folder / "last" / "checkpoint" / "step-2") as checkpoint:
        assert {name.partition("/")[0] for name in checkpoint} == {"model"}
        assert checkpoint.metadata == {"step": 2}


def test_killed_ranks_resume_from_what_is_intact(done: dict[str, Any], tmp_path: Path) -> None:
    told: dict[str, Any] = {"folder": str(tmp_path), "mesh": [1, 2]}
    with pytest.raises(AssertionError):
        trainings(2, told | {"kill": 7})
    folder = tmp_path / "checkpoint"
    (folder / "step-6" / "manifest.json").unlink(missing_ok=True)
    flip_a_bit(folder / "step-4")
    (resumed,) = trainings(2, told)
    assert resumed["begun"] == 2
    assert resumed["losses"] == pytest.approx(done["whole"]["losses"][2:], rel=1e-4)
    for step in (2, 4, 6, 8):
        flip_a_bit(folder / f"step-{step}")
    with pytest.raises(AssertionError, match="none of the checkpoints here loads"):
        trainings(2, told)


def test_what_torchtitan_saved_itself_is_resumed(tmp_path: Path) -> None:
    run_processes("tests.integrations.torchtitan_moving", 2, str(tmp_path))


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("torchtitan", tmp_path)
