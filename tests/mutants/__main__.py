"""Apply each mutant to a copy of the repository, run its tests, and tell which survived.

    python -m tests.mutants               all of them
    python -m tests.mutants wire commit   those with one of these words in their name or file
    python -m tests.mutants --list        only look whether each can still be applied

Exits with 1 if one survived or does not fit the code any more.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import tests.mutants

from .copies import copy_repository, run_tests
from .mutant import Mutant


def all_mutants() -> list[Mutant]:
    """Return the mutants of all modules of this package."""
    found: list[Mutant] = []
    for info in pkgutil.iter_modules(tests.mutants.__path__):
        if info.name != "__main__":
            module = importlib.import_module(f"tests.mutants.{info.name}")
            found += getattr(module, "MUTANTS", ())
    return found


@cache
def run_unchanged(folder: Path, packages: Path, arguments: tuple[str, ...]) -> str:
    """Run tests of mutants on the code as it is, once."""
    return run_tests(folder, packages, arguments)


def try_one(mutant: Mutant, folder: Path, packages: Path) -> str:
    """Apply a mutant, run its tests, undo it, and return what happened."""
    path = folder / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        return f"STALE: its text stands {text.count(mutant.old)} times in {mutant.file}"
    if mutant.equivalent:
        return f"equivalent: {mutant.equivalent}"
    if "--list" in sys.argv:
        return "applies"
    if (found := run_unchanged(folder, packages, mutant.tests)) != "SURVIVED":
        return f"NOT RUN: its tests fail without it, too: {found}"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return run_tests(folder, packages, mutant.tests)
    finally:
        path.write_text(text)


def main() -> int:
    """Run what the command line asks for."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    wanted = [
        mutant
        for mutant in all_mutants()
        if not words or any(word in f"{mutant.name} {mutant.file}" for word in words)
    ]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        packages = copy_repository(folder)
        for mutant in wanted:
            began = time.monotonic()
            found = try_one(mutant, folder, packages)
            bad += found[0].isupper()
            print(f"{mutant.file}: {mutant.name}: {found} ({time.monotonic() - began:.0f} s)")
            sys.stdout.flush()
    print(f"{len(wanted)} mutants, {bad} of them not noticed or out of date")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
