"""Checkpoints to look at, and a way to run the command in this process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import PerRank
from dtckpt.tools.cli import main

Run = Callable[..., Result]


def state() -> dict[str, Any]:
    """A nested state of several dtypes, deterministic, with values of most kinds."""
    generator = torch.Generator().manual_seed(7)
    return {
        "model": {
            "embed.weight": torch.randn(96, 40, generator=generator),
            "layers": [
                {
                    "w": torch.randn(33, 17, generator=generator),
                    "b": torch.randn(17, generator=generator).bfloat16(),
                }
                for _ in range(3)
            ],
            "scale": torch.tensor(2.0),
            "none": torch.empty(0, 4),
        },
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(96, 40)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0], "name": None}],
        },
        "rng": PerRank(
            {"torch": torch.arange(16, dtype=torch.uint8), "seeds": (3, list(range(50)))}
        ),
        "step": 12,
        "note": "x" * 300,
        "hostile": "a\x1b[31mb",
        "loss": float("nan"),
        "blob": b"abcd",
        "dtype": torch.bfloat16,
        "empty": {},
    }


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints and a half-written third."""
    run = tmp_path_factory.mktemp("run")
    dcp.save(state(), run / "step-100", metadata={"loss": 1.5})
    dcp.save({"a": torch.ones(2)}, run / "step-20")
    (run / "step-300" / "data").mkdir(parents=True)
    return run


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A private copy of the large checkpoint, to be damaged at will."""
    return Path(shutil.copytree(saved / "step-100", tmp_path / "source"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``dtckpt`` with arguments; the environment has neither colours nor columns."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args: object, env: Mapping[str, str] | None = None) -> Result:
        return CliRunner().invoke(main, [str(arg) for arg in args], env=env)

    return invoke


def document(result: Result) -> dict[str, Any]:
    """The JSON document on stdout, after a run that said nothing else."""
    assert result.stderr == ""
    value = json.loads(result.stdout)
    assert value["schema_version"] == 1
    return value


def data_file(checkpoint: Path) -> Path:
    """The checkpoint's only data file."""
    (path,) = checkpoint.glob("data/*/*.safetensors")
    return path


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def interrupt(patch: str, folder: Path, *arguments: str | Path) -> None:
    """Start the command, interrupt it where ``patch`` calls ``wait``, and expect it to say so.

    ``patch`` is code that runs before the command; ``folder`` takes a file.
    """
    reached = folder / "reached"
    code = f"""
import time
def wait():
    open({str(reached)!r}, "w").close()
    time.sleep(60)
{patch}
from dtckpt.tools.cli import main
main()
"""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not reached.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in told
