"""A place that is no checkpoint: what is there instead is said, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import NotCommitted, StorageError

from ...conftest import S3


def of_hugging_face(path: Path) -> None:
    path.mkdir()
    (path / "tf_model.h5").write_bytes(b"")
    (path / "config.json").write_text("{}")


def run(path: Path) -> None:
    for step in (1, 2):
        ckpt.save({"w": torch.ones(3)}, path / f"step-{step}", no_dist=True)


def a_file(path: Path) -> None:
    path.write_text("x")


def killed(path: Path) -> None:
    ckpt.save({"w": torch.ones(3)}, path, no_dist=True)
    (path / "manifest.json").unlink()


def runs(path: Path) -> None:
    run(path / "small-7b")
    (path / "notes").mkdir()


def others(path: Path) -> None:
    (path / "src").mkdir(parents=True)
    (path / "README.md").write_text("x")


def misspelt(path: Path) -> None:
    run(path.with_name("places"))


def nothing(path: Path) -> None:
    assert not path.exists()


def inside(path: Path) -> None:
    (path.with_name("manifest.json")).write_text("{}")
    (path / ("0" * 16)).mkdir(parents=True)


def of_others(path: Path) -> None:
    for step in (9, 10):
        (path / f"step-{step}").mkdir(parents=True)
        (path / f"step-{step}" / ".metadata").touch()


def unnumbered(path: Path) -> None:
    ckpt.save({"a": torch.ones(2)}, path / "best", no_dist=True)


CASES: dict[Callable[[Path], None], str] = {
    of_hugging_face: r"Hugging Face.*tf_model\.h5.*from_pretrained",
    run: r"a directory of them: step-2, step-1.*latest",
    a_file: r"it is a file, not a directory",
    inside: r"place is within the checkpoint .*: give that path",
    of_others: r"a directory of them: step-10, step-9\. Give the path of one",
    unnumbered: r"a directory of them: best\. Give the path of one of them$",
    killed: r"manifest\.json is missing.*a save did not finish",
    nothing: r"does not exist\. Check the path$",
    runs: r"above directories of them: small-7b\. dtckpt ls",
    others: r"no checkpoint of a known form here, but src/, README\.md\. Check the path",
    misspelt: r"does not exist\. Check the path: beside it is places",
}


@pytest.mark.filterwarnings("ignore")  # of torch's own
@pytest.mark.parametrize("made", CASES)
def test_what_is_there_is_said(tmp_path: Path, made: Callable[[Path], None]) -> None:
    place = tmp_path / "place"
    made(place)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpt.load({"w": torch.zeros(3)}, place, no_dist=True),
        lambda: ckpt.open(place),
        lambda: ckpt.verify(place),
    )
    for call in calls:
        with pytest.raises(NotCommitted, match=CASES[made]):
            call()


def test_a_bucket_that_does_not_exist_is_named(s3: S3) -> None:
    with pytest.raises(StorageError, match="no-such-bucket-here"):
        ckpt.open("s3://no-such-bucket-here/run/step-1", storage_options=s3.options)
    with pytest.raises(NotCommitted, match="no object has a name that begins so"):
        ckpt.open(f"{s3.url}/nothing", storage_options=s3.options)


def test_what_is_beside_a_wrong_name_in_a_bucket(s3: S3) -> None:
    for step in (9, 10):
        s3.store.publish(f"run/step-{step}/manifest.json", b"{}", overwrite=False)
    s3.store.publish("notes.txt", b"x", overwrite=False)
    for place, told in (
        ("run/step-1", "beside it are step-10, step-9$"),
        ("runs/step-1", rf"in {s3.url} is run$"),
        ("notes.txt", "it is a file, not a directory"),
        ("run/step-9/manifest.json", "is within the checkpoint .*/run/step-9: give that path"),
    ):
        with pytest.raises(NotCommitted, match=told):
            ckpt.open(f"{s3.url}/{place}", storage_options=s3.options)


def test_a_run_in_a_bucket_is_told(s3: S3) -> None:
    for step in (1, 2):
        ckpt.save({"a": torch.ones(2)}, f"{s3.url}/run/step-{step}", storage_options=s3.options)
    with pytest.raises(NotCommitted, match=r"a directory of them: step-2, step-1\."):
        ckpt.open(f"{s3.url}/run", storage_options=s3.options)
