"""Real file systems of other kinds, mounted for a test; skipped by name where that cannot be."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SIZES = {"ext4": 512, "btrfs": 512, "xfs": 512}
"""In MiB, of which the file takes what is written: room for all tests of a module."""

KINDS = (*_SIZES, "linkless")
"""Disks in files, and one in user space that can do little (``linkless``)."""


@contextmanager
def mounted(kind: str, place: Path) -> Generator[Path]:
    """Mount an empty file system of a kind at ``place / "mount"`` for the block."""
    target = place / "mount"
    target.mkdir()
    if kind == "linkless":
        with _in_user_space(place / "source", target):
            yield target
        return
    make = shutil.which(f"mkfs.{kind}")
    if make is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image = place / "image"
    with image.open("wb") as file:
        file.truncate(_SIZES[kind] << 20)
    subprocess.run([make, "-q", str(image)], check=True, capture_output=True)
    _mount(["mount", "-t", kind, "-o", "loop", str(image), str(target)], kind)
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def _mount(command: list[str], kind: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount {kind}: {done.stderr.strip()}")


@contextmanager
def _in_user_space(source: Path, target: Path) -> Generator[None]:
    if importlib.util.find_spec("mfusepy") is None:
        pytest.skip("mfusepy is not installed")
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("/dev/fuse may not be used")
    source.mkdir()
    command = [sys.executable, "-m", "tests.storage.local.linkless", str(source), str(target)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as served:
        try:
            _wait_until_mounted(served, target)
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(target)], check=False, capture_output=True)
            served.terminate()


def _wait_until_mounted(served: subprocess.Popen[str], target: Path) -> None:
    deadline = time.monotonic() + 30
    while not os.path.ismount(target):
        if served.poll() is not None or time.monotonic() > deadline:
            served.kill()
            told = served.stderr.read() if served.stderr is not None else ""
            pytest.skip(f"a file system in user space cannot be served here: {told.strip()}")
        time.sleep(0.02)
