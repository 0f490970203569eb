"""The commit protocol, with every request lost, late or repeated at every place it can be.

What must never be, in any state that can be reached: a manifest without its files; a committed
checkpoint gone that nobody was asked to replace or delete; two saves of one place that both hear
success without one having replaced the other; a failure called certain whose checkpoint appears.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from unittest.mock import patch

import pytest

from dtckpt.checkpoint.cleaning import clean
from dtckpt.checkpoint.deleting import delete
from dtckpt.checkpoint.files.committing import commit, discard
from dtckpt.checkpoint.files.datafile import lay_out
from dtckpt.checkpoint.files.manifest import BorrowedFile, FileRecord, Manifest
from dtckpt.checkpoint.files.places import MANIFEST
from dtckpt.checkpoint.steps import newest_whole
from dtckpt.errors import CheckpointError, Corrupt, InUse
from dtckpt.storage import MemoryStore, Store

from .commit_model import (
    Actor,
    Explorer,
    Objects,
    Outcome,
    Program,
    Programs,
    ReplayStore,
    State,
)

PLACE = "step-2"
LENDER = "step-1"


def record(rank: int) -> FileRecord:
    """Stand for a file without data."""
    return FileRecord(
        rank=rank, size=4096, header_bytes=4096, data_bytes=0, header_digest="", table_digest=""
    )


def manifest(save_id: str, *, of: Manifest | None = None) -> Manifest:
    """Return a manifest of one data file, and those of another checkpoint if it refers to it."""
    borrowed: list[BorrowedFile] = []
    if of is not None:
        borrowed = [
            BorrowedFile(source=LENDER, save_id=of.save_id, record=file) for file in of.files
        ]
    return Manifest(
        save_id=save_id,
        created="",
        metadata=None,
        tree={"dict": {}},
        tensors={},
        files=(record(0),),
        borrowed=tuple(borrowed),
    )


OLD, FIRST, SECOND, NEXT, DEAD = (manifest(number * 16) for number in "0123d")
LENT = manifest("a" * 16)
BORROWING = manifest("b" * 16, of=LENT)
TEXTS = {m.to_bytes(): m for m in (OLD, FIRST, SECOND, NEXT, LENT, BORROWING)}
TEXT_OF = {made.save_id: text for text, made in TEXTS.items()}


@cache
def header_of(save_id: str) -> bytes:
    """Return the whole of a data file without data."""
    return lay_out([], save_id=save_id)[1]


def data_of(place: str, of: Manifest) -> set[tuple[str, bytes]]:
    """Return the data files of a save."""
    header = header_of(of.save_id)
    return {(f"{place}/{of.path_of(file)}", header) for file in of.files}


def committed(place: str, of: Manifest) -> set[tuple[str, bytes]]:
    """Return all objects of a checkpoint."""
    return {*data_of(place, of), (f"{place}/manifest.json", of.to_bytes())}


@dataclass(frozen=True)
class Creator:
    """A save that may replace nothing."""

    run: Program

    def __call__(self, root: Store) -> object:
        return self.run(root)


def writer(made: Manifest, *, overwrite: bool, place: str = PLACE) -> Program:
    """Return a save that has written its data: it is to be committed, as ``SaveJob`` does it."""

    def run(root: Store) -> None:
        store = root.substore(place)
        try:
            commit(store, made, overwrite=overwrite)
        except CheckpointError as error:
            if error.is_certain:
                discard(store, made.save_id, 0)
            raise

    return run if overwrite else Creator(run)


def deleter(place: str, token: str = "d") -> Program:
    """Return a deletion; its ``token`` stands for what it would take from the system's entropy."""

    def run(root: Store) -> None:
        with patch("dtckpt.checkpoint.deleting.secrets.token_hex", return_value=token * 16):
            delete(root.substore(place))

    return run


def cleaner(old: set[tuple[str, bytes]]) -> Program:
    """Return a ``clean`` of everything, where these objects are old."""
    names = frozenset(name for name, _ in old)

    def run(root: Store) -> list[str]:
        assert isinstance(root, ReplayStore)
        root.old = names
        return clean(root)

    return run


@dataclass(frozen=True)
class Case:
    """Who does what to what is there."""

    there: set[tuple[str, bytes]]
    programs: dict[str, Program]
    saves: dict[str, tuple[str, Manifest]]
    """Where, and what, of those actors that save."""
    faults: int


def save(made: Manifest, place: str = PLACE) -> tuple[str, Manifest]:
    return place, made


GOING = {(f"{PLACE}/deleted/{OLD.save_id}/{'e' * 16}.json", OLD.to_bytes())}
"""What a deletion leaves that is killed before it has deleted anything."""

CASES = {
    "two create": Case(
        data_of(PLACE, FIRST) | data_of(PLACE, SECOND),
        {"A": writer(FIRST, overwrite=False), "B": writer(SECOND, overwrite=False)},
        {"A": save(FIRST), "B": save(SECOND)},
        2,
    ),
    "two overwrite": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST) | data_of(PLACE, SECOND),
        {"A": writer(FIRST, overwrite=True), "B": writer(SECOND, overwrite=True)},
        {"A": save(FIRST), "B": save(SECOND)},
        2,
    ),
    "one creates, one overwrites": Case(
        data_of(PLACE, FIRST) | data_of(PLACE, SECOND),
        {"A": writer(FIRST, overwrite=False), "B": writer(SECOND, overwrite=True)},
        {"A": save(FIRST), "B": save(SECOND)},
        2,
    ),
    "two overwrite, one reads": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST) | data_of(PLACE, SECOND),
        {
            "A": writer(FIRST, overwrite=True),
            "B": writer(SECOND, overwrite=True),
            "reader": newest_whole,
        },
        {"A": save(FIRST), "B": save(SECOND)},
        1,
    ),
    "one overwrites, one deletes, one reads": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST),
        {
            "A": writer(FIRST, overwrite=True),
            "deleter": deleter(PLACE),
            "reader": newest_whole,
        },
        {"A": save(FIRST)},
        1,
    ),
    "two save, one deletes": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST) | data_of(PLACE, SECOND),
        {
            "A": writer(FIRST, overwrite=True),
            "B": writer(SECOND, overwrite=False),
            "deleter": deleter(PLACE),
        },
        {"A": save(FIRST), "B": save(SECOND)},
        1,
    ),
    "two create, one deletes": Case(
        data_of(PLACE, FIRST) | data_of(PLACE, SECOND),
        {
            "A": writer(FIRST, overwrite=False),
            "B": writer(SECOND, overwrite=False),
            "deleter": deleter(PLACE),
        },
        {"A": save(FIRST), "B": save(SECOND)},
        1,
    ),
    "two delete": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST),
        {
            "one": deleter(PLACE, "1"),
            "two": deleter(PLACE, "2"),
            "A": writer(FIRST, overwrite=False),
        },
        {"A": save(FIRST)},
        1,
    ),
    "the base is deleted": Case(
        committed(LENDER, LENT) | data_of(PLACE, BORROWING),
        {"A": writer(BORROWING, overwrite=False), "deleter": deleter(LENDER)},
        {"A": save(BORROWING)},
        2,
    ),
    "the base is deleted by two": Case(
        committed(LENDER, LENT) | data_of(PLACE, BORROWING),
        {
            "A": writer(BORROWING, overwrite=False),
            "one": deleter(LENDER, "1"),
            "two": deleter(LENDER, "2"),
        },
        {"A": save(BORROWING)},
        0,
    ),
    "the base is replaced": Case(
        committed(LENDER, LENT) | data_of(LENDER, NEXT) | data_of(PLACE, BORROWING),
        {
            "A": writer(BORROWING, overwrite=False),
            "C": writer(NEXT, overwrite=True, place=LENDER),
        },
        {"A": save(BORROWING), "C": save(NEXT, LENDER)},
        2,
    ),
    "an overwriting save loses its base": Case(
        committed(PLACE, OLD) | committed(LENDER, LENT) | data_of(PLACE, BORROWING),
        {"A": writer(BORROWING, overwrite=True), "deleter": deleter(LENDER)},
        {"A": save(BORROWING)},
        2,
    ),
    "an overwriting save loses its base to one of two": Case(
        committed(PLACE, OLD)
        | committed(LENDER, LENT)
        | data_of(PLACE, BORROWING)
        | data_of(PLACE, SECOND),
        {
            "A": writer(BORROWING, overwrite=True),
            "B": writer(SECOND, overwrite=True),
            "deleter": deleter(LENDER),
        },
        {"A": save(BORROWING), "B": save(SECOND)},
        0,
    ),
    "one overwrites, one cleans": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST) | data_of(PLACE, DEAD),
        {
            "A": writer(FIRST, overwrite=True),
            "cleaner": cleaner(committed(PLACE, OLD) | data_of(PLACE, DEAD)),
        },
        {"A": save(FIRST)},
        2,
    ),
    "one creates, one deletes, one cleans": Case(
        committed(PLACE, OLD) | data_of(PLACE, FIRST) | GOING,
        {
            "A": writer(FIRST, overwrite=False),
            "deleter": deleter(PLACE),
            "cleaner": cleaner(committed(PLACE, OLD) | GOING),
        },
        {"A": save(FIRST)},
        0,
    ),
    "the base is replaced, one cleans": Case(
        committed(LENDER, LENT) | data_of(LENDER, NEXT) | data_of(PLACE, BORROWING),
        {
            "A": writer(BORROWING, overwrite=False),
            "C": writer(NEXT, overwrite=True, place=LENDER),
            "cleaner": cleaner(committed(LENDER, LENT)),
        },
        {"A": save(BORROWING), "C": save(NEXT, LENDER)},
        0,
    ),
    "the base is deleted, one cleans": Case(
        committed(LENDER, LENT) | data_of(PLACE, BORROWING),
        {
            "A": writer(BORROWING, overwrite=False),
            "deleter": deleter(LENDER),
            "cleaner": cleaner(committed(LENDER, LENT)),
        },
        {"A": save(BORROWING)},
        0,
    ),
}


def manifest_at(objects: Objects, place: str) -> Manifest | None:
    """Return the manifest of a place."""
    text = dict(objects).get(f"{place}/manifest.json")
    return None if text is None else TEXTS[text]


def missing(objects: Objects, place: str, of: Manifest) -> list[str]:
    """Return the files of a checkpoint that are not there."""
    needed = [name for name, _ in data_of(place, of)]
    needed += [f"{file.source}/{file.path}" for file in of.borrowed]
    return [name for name in needed if name not in dict(objects)]


def assert_passed_over(objects: Objects, place: str) -> None:
    """Assert that ``latest`` does not take this for a checkpoint."""
    store = MemoryStore({name: data for name, data in objects if name.startswith(f"{place}/")})
    with pytest.raises(Corrupt):
        newest_whole(store)


class Law:
    """What must hold in every state of a case."""

    def __init__(self, case: Case, programs: Programs) -> None:
        self._case = case
        self._programs = programs
        start = frozenset(case.there)
        found = {place: manifest_at(start, place) for place in (PLACE, LENDER)}
        self._before = {place: made for place, made in found.items() if made}
        self._creators = {n for n, run in case.programs.items() if isinstance(run, Creator)}
        self.verdicts: set[tuple[str, ...]] = set()

    def look(self, state: State, outcomes: dict[str, Outcome]) -> None:
        """Raise AssertionError where something is wrong."""
        objects = state.objects
        for place in (PLACE, LENDER):
            there = manifest_at(objects, place)
            if there is not None and missing(objects, place, there):
                # A creation that is repeated after a deletion brings the manifest back. That is
                # all that can, and then nobody takes it for a checkpoint.
                assert self._is_taken_away(state, place, there), f"torn: {place} {there.save_id}"
                assert_passed_over(objects, place)
        ok = {name for name, outcome in outcomes.items() if outcome.verdict == "ok"}
        for name in ok & self._case.saves.keys():
            self._check_kept(state, *self._case.saves[name])
        for place, made in self._before.items():
            self._check_kept(state, place, made)
        for name, outcome in outcomes.items():
            if outcome.verdict == "certain" and name in self._case.saves:
                place, made = self._case.saves[name]
                assert manifest_at(objects, place) != made, (
                    f"{name} failed for certain: it is there"
                )
            if outcome.verdict == "uncertain" and name in self._case.saves:
                sent = [op for op, at, _ in self._requests(state, name) if at.endswith(MANIFEST)]
                assert {"publish", "replace"} & {*sent}, f"{name} has sent nothing, for certain"
            if isinstance(outcome.value, InUse):
                asked = self._requests(state, name)
                assert not any(op in ("remove", "replace") for op, _, _ in asked), f"{name} went on"
        for one, other in combinations(sorted(ok & self._case.saves.keys()), 2):
            saves = (self._case.saves[one], self._case.saves[other])
            if saves[0][0] == saves[1][0]:
                assert any(self._is_taken_away(state, *save) for save in saves), "two winners"
        if len(outcomes) == len(state.actors):
            self.verdicts.add(tuple(outcomes[a.name].verdict for a in state.actors))

    def _check_kept(self, state: State, place: str, made: Manifest) -> None:
        """Only a request that names a committed checkpoint may take it away."""
        if manifest_at(state.objects, place) == made:
            return
        taken = self._is_taken_away(state, place, made)
        assert taken, f"lost: {place} was {made.save_id}, and nobody was to take it away"

    def _is_taken_away(self, state: State, place: str, made: Manifest) -> bool:
        """Whether somebody who may has asked for this very one to be replaced or deleted."""
        return any(
            op in ("remove", "replace") and expected == TEXT_OF[made.save_id]
            for actor in state.actors
            if actor.name not in self._creators
            for op, target, expected in self._requests(state, actor.name)
            if target == f"{place}/manifest.json"
        )

    def _requests(self, state: State, name: str) -> list[tuple[str, str, bytes | None]]:
        """Return what an actor has asked of the store so far."""
        (actor,) = (actor for actor in state.actors if actor.name == name)
        return [(r.op, r.name, r.expected) for r in self._programs.asked(actor)]


def explored(case: Case) -> tuple[Explorer, Law]:
    """Go through a case."""
    programs = Programs(case.programs)
    law = Law(case, programs)
    explorer = Explorer(programs, law.look)
    actors = tuple(Actor(name) for name in case.programs)
    explorer.explore(State(frozenset(case.there), actors, (), case.faults))
    return explorer, law


@pytest.mark.parametrize("name", CASES)
def test_no_order_of_requests_breaks_the_protocol(name: str) -> None:
    explorer, law = explored(CASES[name])
    assert explorer.num_states > 500
    assert any("ok" in verdicts for verdicts in law.verdicts)
