"""Going on from the newest checkpoint that loads, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypedDict

import torch

from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, StorageError
from dtckpt.logs import logger_of

from ..loading.casting import DTypePolicy
from ..loading.loader import load
from ..loading.options import Strict
from ..loading.report import LoadReport
from ..mapping.table import TensorMapping
from ..ranks.text import some_names
from ..runs.finding import Finding, Sighting, find_newest, listings
from ..runs.run import Run
from ..state.renaming import Rename
from ..state.tree import Stateful
from ..timing.bars import progress as bar

logger = logger_of("checkpoint")

Look = Callable[[Callable[[], bytes]], bytes]
"""Runs a function on one rank and returns its result, or raises its error, on all."""


class LoadChoices(TypedDict, total=False):
    """What ``load`` lets a caller choose, under the same names."""

    strict: Strict
    select: str | Sequence[str] | None
    rename: Rename | None
    mapping: TensorMapping | None
    dtype_policy: DTypePolicy
    device: torch.device | str | None
    read_once: bool | None
    allow_pickle: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """What a run goes on from."""

    step: int
    report: LoadReport


def restore_newest(
    runs: Sequence[Run],
    look: Look,
    state: Mapping[Any, Any] | Stateful,
    step: int | None,
    group: Mapping[str, Any],
    choices: LoadChoices,
    *,
    progress: bool,
) -> Restored | None:
    """Load the newest whole checkpoint over all places, or that of ``step``; None if none is there.

    What turns out to be damaged as it is read is passed over, and all that it has overwritten has
    to be filled by the next one. With ``progress`` a terminal shows how far it is.
    """
    damaged: list[Sighting] = []
    passed_over: dict[str, str] = {}
    overwritten: tuple[str, ...] = ()
    while True:
        try:
            finding = search(runs, look, step, damaged, passed_over)
        except CheckpointError as error:
            error.overwritten = overwritten
            raise
        passed_over |= finding.passed_over
        found = finding.found
        if found is None:
            return None
        place = runs[found.place].place_of(found.step)
        try:
            with bar(f"restoring {place.url}", is_shown=progress) as on_progress:
                report = load(state, place, on_progress=on_progress, **group, **choices)
        except (Corrupt, NotCommitted, StorageError) as error:
            if isinstance(error, StorageError) and found.place == len(runs) - 1:
                raise
            logger.warning("%s does not load, looking for another one: %s", place.url, error)
            damaged.append(found)
            passed_over[place.url] = str(error)
            overwritten = tuple(dict.fromkeys((*overwritten, *error.overwritten)))
            if overwritten:
                choices = {**choices, "strict": choices.get("strict", True) or "state"}
        else:
            return Restored(found.step, replace(report, passed_over=passed_over))


def search(
    runs: Sequence[Run],
    look: Look,
    step: int | None,
    without: Sequence[Sighting] = (),
    known: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    """Find the newest whole checkpoint, or that of ``step``, on one rank for all.

    ``known`` says what is wrong with those ``without`` which one is looked for. Nothing is found
    only where nothing is there: Corrupt if there are checkpoints and none is whole, NotCommitted if
    there is none of ``step``.
    """

    def find() -> bytes:
        finding = find_newest(runs, step, without)
        if finding.found is None and finding.steps:
            why = [*known.values(), *finding.passed_over.values()]
            steps = some_names([str(number) for number in finding.steps])
            raise Corrupt(
                f"{runs[-1].store.url}: none of the checkpoints here can be loaded (steps {steps})"
                + (f"; the newest: {why[0]}" if why else "")
            )
        if finding.found is None and step is not None:
            seen = {found.number for _, listing in listings(runs) for found in listing.line}
            raise no_such_step(runs[-1], step, sorted(seen))
        return finding.to_bytes()

    return Finding.from_bytes(look(find))


def no_such_step(run: Run, step: int, steps: Sequence[int]) -> NotCommitted:
    """Return the error for a step that a run does not hold, with those that it does."""
    what = f"it has {some_names([str(number) for number in steps])}" if steps else "it has none"
    return NotCommitted(f"{run.store.url} has no committed checkpoint of step {step}; {what}")
