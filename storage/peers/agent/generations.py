"""Which objects an agent may let go: those of older checkpoints, and what dead saves have left.

A *generation* is a directory: it counts from the moment when ``COMMIT_NAME`` stands in it. Its
objects may lie deeper. Objects of one directory are a *unit*, as the files of one save are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

COMMIT_NAME = "manifest.json"
"""The object that makes a checkpoint of the directory that it stands in."""
MARKS = "needed-by"
"""Directory of a generation where others leave their names that need it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What an agent holds in one directory."""

    directory: str
    names: Collection[str]
    """Last components of the names of its objects."""
    first: int
    """Number of the oldest object; objects are numbered as they come."""
    last: int
    commit: int | None = None
    """Number of the object that makes it a generation."""
    is_data: bool = True
    """Whether all were made once for all, as the files of a save are. What was published is small,
    and may be of use to others than checkpoints."""


def parent(name: str) -> str:
    """Return the directory of a name."""
    return name.rpartition("/")[0]


def is_below(directory: str, other: str) -> bool:
    """Whether a directory is another one or lies in it."""
    return not other or directory == other or directory.startswith(f"{other}/")


def retired(
    units: Mapping[str, Unit], newest: str, writing: Collection[str], keep: int
) -> list[str]:
    """Return the directories that may go now that the generation ``newest`` is committed.

    Beside it in the same directory stay ``keep - 1`` older generations, those that others which
    stay have marked as needed, and what is not older than its own first object or in ``writing``.
    """
    if not newest or newest not in units or units[newest].commit is None:
        return []
    around = parent(newest)
    own = [unit for unit in units.values() if is_below(unit.directory, newest)]
    first = min(unit.first for unit in own)
    commit = units[newest].commit or 0
    beside = {
        directory: unit.commit
        for directory, unit in units.items()
        if unit.commit is not None and directory and parent(directory) == around
    }
    older = sorted((d for d, n in beside.items() if n < commit), key=lambda d: -beside[d])
    staying = {directory for directory in beside if beside[directory] >= commit}
    staying.update(older[: keep - 1])
    _add_needed(units, staying)
    gone = set(older) - staying
    going = [d for d in units if any(is_below(d, directory) for directory in gone)]
    strays = [
        unit.directory
        for unit in _strays(units, writing)
        if is_below(unit.directory, around) and unit.last < first
    ]
    return [*going, *strays]


def strays(units: Mapping[str, Unit], target: str, writing: Collection[str]) -> list[str]:
    """Return the directories of saves that were never committed, the oldest first.

    One that may be under way, the target or one of ``writing``, is not among them.
    """
    found = [unit for unit in _strays(units, writing) if unit.directory != target]
    return [unit.directory for unit in sorted(found, key=lambda unit: unit.last)]


def _strays(units: Mapping[str, Unit], writing: Collection[str]) -> Iterator[Unit]:
    committed = [unit.directory for unit in units.values() if unit.commit is not None]
    for unit in units.values():
        of_any = any(is_below(unit.directory, directory) for directory in committed)
        if unit.is_data and not of_any and unit.directory not in writing:
            yield unit


def _add_needed(units: Mapping[str, Unit], staying: set[str]) -> None:
    """Add the generations that those which stay have marked, and so on."""
    while True:
        needed = {
            directory
            for directory, unit in units.items()
            if unit.commit is not None and directory not in staying
            if _is_needed(units.get(f"{directory}/{MARKS}"), parent(directory), staying)
        }
        if not needed:
            return
        staying |= needed


def _is_needed(marks: Unit | None, around: str, staying: set[str]) -> bool:
    if marks is None:
        return False
    # A claim (``name.<16 digits>.claim``) is of a save that is about to need it.
    return any(
        name.endswith(".claim") or (f"{around}/{name}" if around else name) in staying
        for name in marks.names
    )
