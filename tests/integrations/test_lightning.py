"""Lightning's Trainer and Fabric save, are killed, and resume by dtckpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dtckpt.checkpoint as ckpt

from ..commands import run_command
from ..processes import run_processes
from . import flip_a_bit, needs, run_page

pytestmark = needs("lightning")

STEPS = 8
CROSSINGS = (
    ("mesh1x2", 2, "mesh2x1", 2),
    ("mesh2x2", 4, "single", 1),
    ("single", 1, "mesh2x2", 4),
    ("fsdp", 2, "mesh1x2", 2),
    ("mesh3x1", 3, "fsdp", 2),
)
"""Kinds of parallelism, with their ranks, that train the first steps, and those that go on."""


def fits(size: int, *trainings: dict[str, Any]) -> Any:
    """Run trainings one after the other and return what rank 0 tells of each."""
    told = json.dumps([{"size": size, "steps": STEPS} | training for training in trainings])
    text = run_processes("tests.integrations.lightning_ranks", size, told)[0]
    return json.loads(text.splitlines()[-2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """What a training that nothing interrupts gives, and those that go on elsewhere."""
    whole = {"kind": "single", "size": 1, "folder": f"{folder}/whole", "keep": -1}
    trainings = [whole]
    for kind, size, other, other_size in CROSSINGS:
        first, second = f"{folder}/{kind}", f"{folder}/{kind}-{other}"
        trainings += [
            {"kind": kind, "size": size, "folder": first, "steps": 4, "background": True},
            {"kind": other, "size": other_size, "folder": second, "resume": first},
        ]
    names = ["whole", *(name for c in CROSSINGS for name in (c[0], f"{c[0]}-{c[2]}"))]
    return dict(zip(names, fits(4, *trainings), strict=True))


@pytest.mark.parametrize(("kind", "size", "other", "_"), CROSSINGS)
def test_ranks_that_hold_parts_resume_on_others(
    done: dict[str, Any], folder: Path, kind: str, size: int, other: str, _: int
) -> None:
    losses = done["whole"]["losses"]
    assert len(losses) == STEPS
    assert done[kind]["losses"] == pytest.approx(losses[:4], rel=1e-5)
    assert done[kind]["saved"] == ["epoch=0-step=4.ckpt"], "older ones are removed"
    saved = folder / kind / "epoch=0-step=4.ckpt"
    assert ckpt.verify(saved).problems == ()
    if kind != "single":  # nothing was gathered: every rank has written
        assert len(list(saved.rglob("*.safetensors"))) == size
    assert done[f"{kind}-{other}"]["losses"] == pytest.approx(losses[4:], rel=1e-5)


def test_ddp_is_killed_and_resumes_where_a_checkpoint_is_intact(
    done: dict[str, Any], tmp_path: Path
) -> None:
    training = {"kind": "ddp", "folder": str(tmp_path), "keep": -1, "background": True}
    with pytest.raises(AssertionError):
        fits(2, training | {"kill": 7})
    flip_a_bit(tmp_path / "epoch=0-step=4.ckpt")
    (tmp_path / "epoch=0-step=6.ckpt" / "manifest.json").unlink(missing_ok=True)
    (resumed,) = fits(2, training | {"resume": str(tmp_path)})
    assert resumed["from"] == "epoch=0-step=2.ckpt"
    assert resumed["losses"] == done["whole"]["losses"][2:]


def test_a_training_is_never_begun_anew_for_damage(done: dict[str, Any], folder: Path) -> None:
    from dtckpt.integrations.lightning import newest

    whole = folder / "whole"
    assert newest(whole) == str(whole / "epoch=0-step=8.ckpt")
    flip_a_bit(whole / "epoch=0-step=8.ckpt")
    assert newest(whole, read=False) == str(whole / "epoch=0-step=8.ckpt")
    assert newest(whole) == str(whole / "epoch=0-step=6.ckpt")
    for number in (2, 4, 6):
        flip_a_bit(whole / f"epoch=0-step={number}.ckpt")
    with pytest.raises(ckpt.Corrupt, match="none of the checkpoints here is intact"):
        newest(whole)


def test_what_lightning_saves_is_an_ordinary_checkpoint(done: dict[str, Any], folder: Path) -> None:
    path = folder / "single" / "epoch=0-step=4.ckpt"
    told = run_command("inspect", path)
    assert "state_dict" in told
    assert "up.weight" in told
    with ckpt.open(path) as checkpoint:
        assert checkpoint.metadata == {"epoch": 0, "global_step": 4}
        assert checkpoint.state_dict()["hyper_parameters"] == {"kind": "single"}


def test_fabric_saves_and_loads_on_another_mesh(tmp_path: Path) -> None:
    run_processes("tests.integrations.fabric_ranks", 4, str(tmp_path))


def test_what_is_missing_or_cannot_be_saved_is_told(tmp_path: Path) -> None:
    from dtckpt.integrations.frameworks import framework
    from dtckpt.integrations.lightning import DtckptIO, newest

    with pytest.raises(ImportError, match=r'pip install "dtckpt\[lightning\]"'):
        framework("lightning", "lightning.no_such_module")
    with pytest.raises(ckpt.Unsavable, match="hyper_parameters/loss"):
        DtckptIO().save_checkpoint({"hyper_parameters": {"loss": print}}, tmp_path / "a")
    with pytest.raises(ckpt.NotCommitted):
        DtckptIO().load_checkpoint(tmp_path / "a")
    assert newest(tmp_path) is None


def _remove_and_end(io: Any, path: Path) -> None:
    io.remove_checkpoint(path)
    io.teardown()


def test_a_checkpoint_stays_until_its_successor_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtckpt.integrations.lightning import DtckptIO

    io = DtckptIO(async_save=True)
    io.save_checkpoint({"global_step": 1}, tmp_path / "1.ckpt")
    io.teardown()

    def fails(*_: object) -> None:
        raise ckpt.StorageError("the disk is full")

    monkeypatch.setattr("dtckpt.checkpoint.saving.job.SaveJob.finish", fails)
    io.save_checkpoint({"global_step": 2}, tmp_path / "2.ckpt")
    with pytest.raises(ckpt.StorageError, match="the disk is full"):
        _remove_and_end(io, tmp_path / "1.ckpt")
    assert io.load_checkpoint(tmp_path / "1.ckpt") == {"global_step": 1}


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("lightning", tmp_path)
