"""Another save replaces a checkpoint while it is read: one of the two as a whole, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.formats import opening
from dtckpt.checkpoint.loading import loader
from dtckpt.errors import Corrupt, ObjectNotFound
from dtckpt.storage import Fault, FaultyStore, LocalStore, Rule

from ...ranks import run_ranks


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value)), "v": torch.full((9,), value), "step": value}


class Replaced(Fault):
    """Another job saves over the checkpoint right before something is read."""

    def __init__(self, place: Path, new: dict[str, Any]) -> None:
        self.place, self.new = place, new

    def before(self) -> None:
        ckpt.save(self.new, self.place, overwrite=True, no_dist=True)


def replacing(place: Path, new: dict[str, Any], nth: int = 1, times: int = 1) -> FaultyStore:
    rules = [
        Rule(Replaced(place, new), op="read*", name="data/*", nth=number)
        for number in range(nth, nth + times)
    ]
    return FaultyStore(LocalStore(place), rules)


def is_state(got: dict[str, Any], value: int) -> bool:
    wanted = state(value)
    return got["step"] == value and all(torch.equal(got[name], wanted[name]) for name in "wv")


@pytest.mark.parametrize("nth", [1, 2])
def test_a_load_reads_the_manifest_again(tmp_path: Path, nth: int) -> None:
    place = tmp_path / "p"
    ckpt.save(state(1), place)
    got = state(0)
    report = ckpt.load(got, replacing(place, state(2), nth))
    assert is_state(got, 2) or (nth == 2 and is_state(got, 1))
    assert set(report.loaded) == {"w", "v", "step"}


def test_a_load_begins_anew_as_often_as_that(tmp_path: Path) -> None:
    place = tmp_path / "p"
    ckpt.save(state(1), place)
    got = state(0)
    ckpt.load(got, replacing(place, state(2), times=3))
    assert is_state(got, 2)


def test_one_that_is_replaced_again_and_again_is_an_error_that_says_so(tmp_path: Path) -> None:
    place = tmp_path / "p"
    ckpt.save(state(1), place)
    with pytest.raises(ObjectNotFound, match=r"replaced the checkpoint each of the 5 times"):
        ckpt.load(state(0), replacing(place, state(2), times=100))
    got = state(0)
    ckpt.load(got, place)
    assert is_state(got, 2)


def test_so_do_all_ranks_of_a_load(tmp_path: Path) -> None:
    place = tmp_path / "p"
    ckpt.save(state(1), place)

    def body(rank: int, group: Any) -> bool:
        got = state(0)
        store = replacing(place, state(2)) if rank == 1 else LocalStore(place)
        ckpt.load(got, store, process_group=group, read_once=False)
        return is_state(got, 2)

    assert all(run_ranks(2, body))


def test_a_checkpoint_that_was_damaged_and_not_replaced_is_told_as_before(tmp_path: Path) -> None:
    place = tmp_path / "p"
    ckpt.save(state(1), place)
    (data,) = (place / "data").glob("*/*.safetensors")
    data.unlink()
    with pytest.raises(Corrupt, match="data file is missing"):
        ckpt.load(state(0), place)


def test_what_only_the_first_attempt_filled_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stay from the checkpoint before, beside the rest of the new one."""
    place = tmp_path / "p"
    big = {"a": torch.ones(300_000), "b": torch.ones(300_000)}
    ckpt.save(big, place)
    (data,) = (place / "data").glob("*/*.safetensors")
    text = bytearray(data.read_bytes())
    text[-200_000] ^= 1  # so that it fails once something has been overwritten
    data.write_bytes(text)
    got = {name: torch.zeros_like(value) for name, value in big.items()}
    looks = opening.is_replaced

    def replace_and_look(*args: Any) -> bool:
        ckpt.save({"c": torch.ones(3)}, place, overwrite=True)
        return looks(*args)

    monkeypatch.setattr(loader, "is_replaced", replace_and_look)
    with pytest.raises(Corrupt, match="Destinations already overwritten"):
        ckpt.load(got, place, strict=False)


def test_an_opened_checkpoint_says_that_it_was_replaced(tmp_path: Path) -> None:
    place = tmp_path / "p"
    ckpt.save(state(1), place)
    with ckpt.open(place) as opened:
        ckpt.save(state(2), place, overwrite=True)
        with pytest.raises(ObjectNotFound, match=r"replaced the checkpoint .* Open it again"):
            opened["w"][...]
    with ckpt.open(place) as opened:
        assert torch.equal(opened["w"][...], state(2)["w"])
    with ckpt.open(place) as opened:
        (data,) = (place / "data").glob("*/*.safetensors")
        data.unlink()
        with pytest.raises(Corrupt, match="data file is missing"):
            opened["w"][...]
