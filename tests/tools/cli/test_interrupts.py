"""Ctrl-C while a command writes: nothing is half-written, and the next call goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import Mesh

from .conftest import Run

_HALF_WAY = """
import os, signal, sys
from contextlib import contextmanager
from dtckpt.tools.cli import main
from dtckpt.tools.cli.common import telling

pressed = []

@contextmanager
def progress(label, is_shown):
    def on_progress(done, total):
        if 2 * done > total and not pressed:
            pressed.append(done)
            os.killpg(0, signal.SIGINT)
    yield on_progress

telling.progress = progress
main(sys.argv[1:])
"""
_AT_THE_START = """
import os, signal, subprocess, sys
from dtckpt.tools.cli import main

class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.killpg(0, signal.SIGINT)

subprocess.Popen = Popen
main(sys.argv[1:])
"""
"""Before the other process can have said what it does about the signal."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    state = {f"w{i}": torch.arange(1 << 17) + i for i in range(8)}
    dcp.save({"model": state}, folder / "one")
    rules = dcp.parse_rules("*=S(0)")
    dcp.reshard(folder / "one", folder / "four", Mesh((4,), ("dp",)), rules)
    return folder / "four"


@pytest.mark.parametrize(
    ("driver", "command", "options"),
    [
        (_AT_THE_START, "reshard", "--to-world 8 --processes 2 --memory 1GiB"),
        (_HALF_WAY, "reshard", "--to-world 8 --processes 2 --memory 1GiB"),
        (_HALF_WAY, "copy", ""),
        (_HALF_WAY, "convert", "--to safetensors --part model --max-file-size 1MiB"),
    ],
)
def test_the_next_call_goes_on(
    run: Run, source: Path, tmp_path: Path, driver: str, command: str, options: str
) -> None:
    target = tmp_path / "target"
    args = [command, str(source), str(target), *options.split()]
    done = subprocess.run(
        [sys.executable, "-c", driver, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: interrupted\n")
    left = {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file()}
    assert all(path.match("data/*/*.safetensors") for path in left)  # of dtckpt alone, and whole
    assert left or command != "reshard" or driver == _AT_THE_START
    assert run(*args).exit_code == 0
    assert all(path.stat().st_mtime_ns == before for path, before in left.items())
    names = "w{}" if command == "convert" else "model/w{}"
    with dcp.open(target) as found:
        for i in range(8):
            assert torch.equal(found[names.format(i)][...], torch.arange(1 << 17) + i)
