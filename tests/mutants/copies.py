"""Tests run in a copy of the repository, in which the code may be changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
"""Tests that take longer hang, which is noticed, too."""
FOLDERS = ("checkpoint", "dtensor", "integrations", "storage", "tools")


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


def run_tests(
    folder: Path, packages: Path, arguments: tuple[str, ...], limit: float = LIMIT_SECONDS
) -> str:
    """Run pytest in the copy, for ``limit`` seconds; return what happened in a word and a line."""
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
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"killed: its tests hang for {limit:.0f} s"
    if done.returncode == 0:
        return "SURVIVED"
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not told:  # pytest could not run them: a wrong name, for one
        return f"NOT RUN: {(done.stdout + done.stderr)[-300:]}"
    return f"killed by {told[0].split(' ', 1)[1][:100]}"
