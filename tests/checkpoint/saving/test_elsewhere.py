"""A save whose storage fails is made at another place, on all ranks or on none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import AlreadyCommitted, NotCommitted, StorageError
from dtckpt.storage import FaultyStore, LocalStore, RaiseError, Rule, Store

from ...ranks import run_ranks


def state(group: dist.ProcessGroup, rank: int, value: float = 0) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", Mesh((2,)), groups=[group])
    local = torch.arange(50.0)[None].repeat(3, 1) + rank + value
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=(6, 50)), "n": 3}


def failing(root: Path, op: Any, **rule: Any) -> Store:
    return FaultyStore(LocalStore(root), [Rule(RaiseError(StorageError("dead")), op=op, **rule)])


def save(how: str, *args: Any, **options: Any) -> dcp.SaveReport:
    if how == "now":
        return dcp.save(*args, **options)
    given = args[0]
    handle = dcp.async_save(*args, **options)
    given["w"].to_local().zero_()  # what is written is what was copied
    return handle.result(60)


@pytest.mark.parametrize("how", ["now", "in the background"])
@pytest.mark.parametrize(
    ("op", "where"),
    [*itertools.product(["stat", "create", "write", "close"], [0, 1]), ("publish", 0)],
)
def test_another_place_is_taken_by_all(tmp_path: Path, how: str, op: str, where: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> str:
        first: Any = failing(tmp_path / "a", op) if rank == where else tmp_path / "a"
        report = save(
            how, state(group, rank), first, elsewhere=[tmp_path / "b"], process_group=group
        )
        assert report.written_bytes > 0
        return report.url

    urls = run_ranks(2, body)
    # Other ranks need not ask whether the place is free.
    place = "a" if (op, where) == ("stat", 1) else "b"
    assert urls == [str(tmp_path / place)] * 2
    with dcp.open(urls[0]) as checkpoint:
        expected = torch.arange(50.0) + torch.tensor([0.0, 0, 0, 1, 1, 1])[:, None]
        assert torch.equal(checkpoint["w"][:], expected)
    assert not dcp.verify(urls[0]).problems
    if place == "b":
        with pytest.raises(NotCommitted):
            dcp.open(tmp_path / "a")


def test_the_error_of_the_first_place_is_told_where_all_fail(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        places = [failing(tmp_path / name, "create") for name in "abc"]
        with pytest.raises(StorageError, match="dead") as caught:
            dcp.save(state(group, rank), places[0], elsewhere=places[1:], process_group=group)
        assert sum("and elsewhere" in note for note in caught.value.__notes__) == 2

    run_ranks(2, body)


def test_other_failures_are_not_evaded(tmp_path: Path) -> None:
    dcp.save({"n": 1}, tmp_path / "a")
    with pytest.raises(AlreadyCommitted):
        dcp.save({"n": 2}, tmp_path / "a", elsewhere=[tmp_path / "b"])
    assert not (tmp_path / "b").exists()


def test_a_base_that_cannot_be_read_is_not_referred_to(tmp_path: Path) -> None:
    first = {"frozen": torch.ones(100_000), "n": 1}
    dcp.save(first, tmp_path / "step-1")
    dead = failing(tmp_path, "*")
    report = dcp.save(
        {**first, "n": 2},
        dead.substore("step-2"),
        base=dead.substore("step-1"),
        elsewhere=[tmp_path / "other" / "step-2"],
    )
    assert report.url == str(tmp_path / "other" / "step-2")
    assert report.borrowed_bytes == 0
    assert not dcp.verify(report.url).problems


def test_what_is_written_elsewhere_refers_to_no_base(tmp_path: Path) -> None:
    state: dict[str, Any] = {"frozen": torch.ones(100_000), "n": 1}
    dcp.save(state, tmp_path / "step-1")
    full = failing(tmp_path, "close", name="step-2/*")
    report = dcp.save(
        {**state, "n": 2},
        full.substore("step-2"),
        base=full.substore("step-1"),
        elsewhere=[tmp_path / "other" / "step-2"],
    )
    assert (report.bases, report.borrowed_bytes) == ((), 0)
    assert not dcp.verify(report.url).problems
