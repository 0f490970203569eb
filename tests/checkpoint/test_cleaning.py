"""What killed saves and deletions leave is taken away, and nothing else."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.datafile import lay_out
from dtckpt.errors import AccessDenied, InUse, NotCommitted, StorageError
from dtckpt.storage import (
    Fault,
    FaultyStore,
    LocalStore,
    MemoryStore,
    RaiseError,
    Rule,
    Store,
    open_store,
)

from ..conftest import BUCKET, S3

AT_ONCE = timedelta(seconds=-5)
"""Older than a moment that has not come yet: everything is."""


class Killed(BaseException):
    """Stands for the end of the process: nothing that the code does afterwards has an effect."""


class Kill(Fault):
    def before(self) -> None:
        raise Killed


def state(value: float = 1.0) -> dict[str, Any]:
    """Something to save."""
    return {"w": torch.full((100,), value), "n": value}


def killed_save(store: Store, op: str, **options: Any) -> None:
    """Save, and die at the first call of a kind; nothing is called after it."""
    dying = FaultyStore(store, [Rule(Kill(), op=op, nth=1), *AFTERWARDS])
    with pytest.raises(Killed):
        dcp.save(state(7.0), dying, **options)


AFTERWARDS = [Rule(Kill(), op="delete")]


def names(path: Path) -> list[str]:
    """Return all files below a directory."""
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def value_of(place: Any) -> float:
    """Return what was saved there."""
    into = state(0.0)
    dcp.load(into, place)
    assert float(into["w"][0]) == into["n"]
    return into["n"]


def test_files_of_dead_saves_go_and_checkpoints_stay(tmp_path: Path) -> None:
    dcp.save(state(1.0), tmp_path / "step-1")
    dcp.save(state(2.0), tmp_path / "step-2")
    before = names(tmp_path)
    killed_save(LocalStore(tmp_path / "step-2"), "publish", overwrite=True)
    killed_save(LocalStore(tmp_path / "step-3"), "publish")
    left = sorted(set(names(tmp_path)) - set(before))
    assert [name.partition("/")[0] for name in left] == ["step-2", "step-3"]
    assert dcp.clean(tmp_path) == [], "they may be of saves that are under way"
    assert sorted(dcp.clean(tmp_path, older_than=AT_ONCE)) == left
    assert names(tmp_path) == before
    assert not (tmp_path / "step-3").exists()
    assert value_of(tmp_path / "step-2") == 2.0
    assert dcp.clean(tmp_path, older_than=AT_ONCE) == []


SAVE_ID = "0123456789abcdef"


def data_file(directory: Path, rank: int, *, named: str = SAVE_ID, of: str = SAVE_ID) -> Path:
    """Make a data file without tensors that says that it is ``of`` a save."""
    file = directory / f"data/{named}/{rank:05}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lay_out([], save_id=of)[1])
    return file


def test_one_young_file_keeps_a_save(tmp_path: Path) -> None:
    old, young = (data_file(tmp_path / "step-1", rank) for rank in range(2))
    later = old.stat().st_mtime + 1000
    os.utime(young, (later, later))
    assert dcp.clean(tmp_path, older_than=timedelta(seconds=-500)) == []
    assert len(dcp.clean(tmp_path, older_than=timedelta(seconds=-2000))) == 2


def test_a_copy_that_keeps_the_times_of_its_files_is_young(tmp_path: Path) -> None:
    file = data_file(tmp_path / "step-1", 0)
    os.utime(file, (0, 0))  # as rsync -a and tar x leave it
    assert dcp.clean(tmp_path) == []
    assert len(dcp.clean(tmp_path, older_than=AT_ONCE)) == 1


def test_a_young_claim_keeps_what_no_manifest_names(tmp_path: Path) -> None:
    data_file(tmp_path / "step-1", 0)
    claim = tmp_path / "step-1/needed-by/step-2.fedcba9876543210.claim"
    claim.parent.mkdir()
    claim.touch()
    later = claim.stat().st_mtime + 1000
    os.utime(claim, (later, later))
    assert dcp.clean(tmp_path, older_than=timedelta(seconds=-500)) == []
    assert len(dcp.clean(tmp_path, older_than=timedelta(seconds=-2000))) == 2


def test_what_other_programs_have_written_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (
        "data/0123456789abcdef/0000.safetensors",
        "data/0123456789abcdef/000000.safetensors",
        "data/0123456789abcdef/00000.safetensors.bak",
        "data/0123456789ABCDEF/00000.safetensors",
        "data/0123456789abcde/00000.safetensors",
        "datas/0123456789abcdef/00000.safetensors",
        "data/2024/00000.safetensors",
        "needed-by/step-2.0123456789abcde.claim",
        "deleted/0123456789abcdef/notes.json",
        "deleted/photos/0123456789abcdef.json",
        "web/.manifest.json.0123456789abcdef.tmp",
        ".notes.txt.0123456789abcdef.tmp",
        "mail/needed-by/.x.0123456789abcde.tmp",
        "mail/.inbox.lock",
    ):
        file = tmp_path / "others" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    claim = tmp_path / "others/needed-by/step-2.0123456789abcdef.claim"
    claim.write_text("a claim of ours is empty")
    data_file(tmp_path / "step-1", 0, of="f" * 16)
    data_file(tmp_path / "step-1", 1).write_bytes(b"x")
    data_file(tmp_path / "step-1", 2).write_bytes(b"\xff" * 8)
    data_file(tmp_path / "step-1", 3).write_bytes(b"")
    data_file(tmp_path / "step-2", 0).write_bytes((1 << 40).to_bytes(8, "little"))
    before = names(tmp_path)
    assert dcp.clean(tmp_path, older_than=AT_ONCE) == []
    assert names(tmp_path) == before
    assert "the file belongs to the save 'ffffffffffffffff'" in caplog.text
    ours = data_file(tmp_path / "step-1", 4)
    assert dcp.clean(tmp_path, older_than=AT_ONCE) == [str(ours.relative_to(tmp_path))]


def test_names_that_no_store_takes_are_passed_over(s3: S3) -> None:
    for name in ("step-1//data/0123456789abcdef/00000.safetensors", "a/../x", "./y", "a\\b"):
        s3.client.put_object(Bucket=BUCKET, Key=s3.key(name), Body=lay_out([], save_id=SAVE_ID)[1])
    s3.client.create_multipart_upload(Bucket=BUCKET, Key=s3.key("a//b"))
    killed_save(s3.store, "publish")
    assert len(dcp.clean(s3.store, older_than=AT_ONCE)) == 1
    assert dcp.clean(s3.store, older_than=AT_ONCE) == []


def test_uploads_that_cannot_be_listed_are_told(
    s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed_save(s3.store, "publish")

    def denied(*_: Any) -> Any:
        raise AccessDenied("not allowed: s3:ListBucketMultipartUploads")

    monkeypatch.setattr("dtckpt.storage.remote.fsspec.dialects.s3.S3.unfinished", denied)
    assert len(dcp.clean(s3.store, older_than=AT_ONCE)) == 1
    assert "uploads were not cleaned" in caplog.text
    assert "ListBucketMultipartUploads" in caplog.text


def test_unfinished_files_go(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "step-1")
    stream = store.create("data/0123456789abcdef/00000.safetensors", 10)
    stream.write(b"12345")
    assert dcp.clean(tmp_path) == []
    (name,) = dcp.clean(tmp_path / "step-1", older_than=AT_ONCE)
    assert name.endswith(".tmp")
    assert names(tmp_path) == []
    stream.abort()


def test_uploads_in_parts_go(s3: S3) -> None:
    # The server breaks down over parts of an upload that it has forgotten.
    store = open_store(f"{s3.url}/step-1", **s3.options, deadline=3)
    size = 33 << 20
    dead, alive = (
        store.create("data/0123456789abcdef/00000.safetensors", size),
        store.create("x", 1),
    )
    dead.write(bytes(size))
    other = s3.store.sibling(s3.store.url.rpartition("/")[2] + "-other").create("y", size)
    foreign = s3.client.create_multipart_upload(Bucket=BUCKET, Key=s3.key("step-1/movie.mp4"))
    name, film = sorted(store.leftovers())
    assert film.startswith("movie.mp4?uploadId=")
    assert name.startswith("data/0123456789abcdef/00000.safetensors?uploadId=")
    assert list(store.leftovers(before=0.0)) == []
    assert dcp.clean(s3.url, storage_options=s3.options, older_than=AT_ONCE) == [f"step-1/{name}"]
    assert list(store.leftovers()) == [film]
    s3.client.abort_multipart_upload(
        Bucket=BUCKET, Key=foreign["Key"], UploadId=foreign["UploadId"]
    )
    with pytest.raises(StorageError):
        dead.close()
    other.write(bytes(size))
    other.close()
    alive.abort()


def test_a_claim_of_a_dead_save_keeps_its_base_until_it_is_cleaned(tmp_path: Path) -> None:
    first = LocalStore(tmp_path / "step-1")
    dcp.save(state(1.0), first)
    dying = FaultyStore(LocalStore(tmp_path), [Rule(Kill(), op="publish", name="*/manifest.json")])
    with pytest.raises(Killed):
        dcp.save(state(1.0), dying.substore("step-2"), base=dying.substore("step-1"))
    for call in (lambda: dcp.delete(first), lambda: dcp.save(state(), first, overwrite=True)):
        with pytest.raises(InUse, match=r"a save of step-2 .*clean takes away .*\.claim"):
            call()
    assert value_of(first) == 1.0
    cleaned = dcp.clean(tmp_path, older_than=AT_ONCE)
    assert [name.partition("/")[0] for name in sorted(cleaned)] == ["step-1", "step-2"]
    assert value_of(first) == 1.0
    dcp.delete(first)
    assert names(tmp_path) == []


def test_what_others_refer_to_stays(tmp_path: Path) -> None:
    first, second = (LocalStore(tmp_path / f"step-{i}") for i in (1, 2))
    dcp.save(state(1.0), first)
    dcp.save(state(1.0), second, base=first)
    first.delete(["manifest.json"])
    assert dcp.clean(tmp_path, older_than=AT_ONCE) == []
    assert value_of(second) == 1.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_who_refers_to_an_earlier_save_of_a_place_does_not_keep_the_later_one(
    tmp_path: Path, interrupted: bool
) -> None:
    first, second = (LocalStore(tmp_path / f"step-{i}") for i in (1, 2))
    dcp.save(state(1.0), first)
    dcp.save(state(1.0), second, base=first)
    (data,) = first.list("data")
    first.delete(["manifest.json"])
    dcp.save(state(3.0), first)
    if interrupted:
        broken = Rule(RaiseError(StorageError("no reply")), op="delete", nth=3)
        with pytest.raises(StorageError, match="no reply"):
            dcp.delete(FaultyStore(first, [broken]))
    dcp.delete(first)
    assert [info.name for info in first.list()] == [data.name, "needed-by/step-2"]
    assert dcp.clean(tmp_path, older_than=AT_ONCE) == []
    assert value_of(second) == 1.0


def test_nothing_goes_where_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    dcp.save(state(), tmp_path / "step-1")
    (tmp_path / "step-1" / "manifest.json").write_bytes(b"damaged")
    before = names(tmp_path)
    assert dcp.clean(tmp_path, older_than=AT_ONCE) == []
    assert names(tmp_path) == before


def test_a_store_that_gives_no_times_is_left_alone() -> None:
    store = MemoryStore()
    killed_save(store, "publish")
    assert dcp.clean(store, older_than=AT_ONCE) == []
    assert len(list(store.list())) == 1


@pytest.mark.parametrize("again", ["delete", "clean"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_interrupted_deletion_is_finished(tmp_path: Path, nth: int, again: str) -> None:
    place = LocalStore(tmp_path / "step-1")
    dcp.save(state(), place)
    with pytest.raises(Killed):  # what it was about has to be found in the record that it left
        dcp.delete(FaultyStore(place, [Rule(Kill(), op="delete", nth=nth)]))
    assert list(place.list("deleted"))
    stands = nth == 1
    if stands:
        assert value_of(place) == 1.0
    else:
        with pytest.raises(NotCommitted):
            dcp.open(place)
    if again == "clean":
        dcp.clean(tmp_path, older_than=AT_ONCE)
        assert not list(place.list("deleted"))
        if not stands:
            assert names(tmp_path) == []
            return
        assert value_of(place) == 1.0
    dcp.delete(place)
    assert names(tmp_path) == []
    with pytest.raises(NotCommitted):
        dcp.delete(place)


def test_a_place_saved_to_again_after_half_a_deletion(tmp_path: Path) -> None:
    place = LocalStore(tmp_path / "step-1")
    dcp.save(state(1.0), place)
    broken = Rule(RaiseError(StorageError("no reply")), op="delete", nth=2)
    with pytest.raises(StorageError, match="no reply"):
        dcp.delete(FaultyStore(place, [broken]))
    dcp.save(state(2.0), place)
    dcp.clean(tmp_path, older_than=AT_ONCE)
    assert value_of(place) == 2.0
    assert len(names(tmp_path)) == 2
