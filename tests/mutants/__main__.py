"""Apply each mutant to a copy of the repository, run its tests, and tell which survived.

    python -m tests.mutants               all of them
    python -m tests.mutants wire commit   those with one of these words in their name or file
    python -m tests.mutants --list        only look whether each can still be applied

Exits with 1 if one survived or does not fit the code any more.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import tests.mutants

from .mutant import Mutant

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
"""A mutant whose tests take longer hangs, which is noticed, too."""
FOLDERS = ("checkpoint", "dtensor", "storage", "tools")


def all_mutants() -> list[Mutant]:
    """Return the mutants of all modules of this package."""
    found: list[Mutant] = []
    for info in pkgutil.iter_modules(tests.mutants.__path__):
        if info.name not in ("mutant", "__main__"):
            module = importlib.import_module(f"tests.mutants.{info.name}")
            found += module.MUTANTS
    return found


def copy_repository(folder: Path) -> Path:
    """Copy what git knows or would add, as it is now, and return where ``dtckpt`` is found."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    packages = folder / "build" / "mutants"
    (packages / "dtckpt").mkdir(parents=True)
    for name in FOLDERS:
        (packages / "dtckpt" / name).symlink_to(folder / name)
    for path in (folder / "tools" / "namespace").iterdir():
        (packages / "dtckpt" / path.name).symlink_to(path)
    return packages


def run_tests(folder: Path, packages: Path, arguments: tuple[str, ...]) -> str:
    """Run pytest in the copy and return what happened in a word and a line."""
    environment = {
        "PYTHONPATH": os.pathsep.join((str(packages), str(folder))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"killed: its tests hang for {LIMIT_SECONDS} s"
    if done.returncode == 0:
        return "SURVIVED"
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not told:  # pytest could not run them: a wrong name, for one
        return f"NOT RUN: {(done.stdout + done.stderr)[-300:]}"
    return f"killed by {told[0].split(' ', 1)[1][:100]}"


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
