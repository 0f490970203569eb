"""The quick part of the tests on other Pythons and other torches. Run by ``make test-matrix``.

Each pair has a virtual environment of its own, some GB, which is made once and serves every
checkout of this user: it lies in ``$DTCKPT_MATRIX``, by default ``~/.cache/dtckpt/matrix``, and
holds what the tests need, and of the package its name, version and command only. An interpreter or
a release of torch that this machine cannot get is skipped, by name.

With ``DTCKPT_MATRIX_TESTS=whole`` it is all tests, of one environment as a rule
(``make test-matrix MATRIX="python3.11-torch2.15.0 --seconds 7200"``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environments import ROOT, NotAvailable, NotInstalled, install, run_each, run_tests

PLACE = Path(os.environ.get("DTCKPT_MATRIX", "~/.cache/dtckpt/matrix")).expanduser()
QUICK = (
    "tests/test_imports.py",
    "tests/dtensor/test_torch_private.py",
    "tests/dtensor/comm/test_devices.py",
    "tests/dtensor/mesh/test_device_mesh.py",
    "tests/dtensor/test_dtensor.py",
    "tests/dtensor/tensor/test_gradients.py",
    "tests/dtensor/mesh/test_interop.py",
    "tests/dtensor/mesh/test_torch_mesh.py",
    "tests/dtensor/calls/test_quick.py",
    "tests/dtensor/random/test_random_hazards.py",
    "tests/dtensor/redistribute/test_redistribute_many.py",
    "tests/dtensor/test_compile.py",
    "tests/dtensor/fsdp/test_fully_shard.py",
    "tests/checkpoint/dcp/test_drop_in.py",
    "tests/checkpoint/dcp/test_storage.py",
    "tests/checkpoint/exporting/test_dcp_files.py",
    "tests/checkpoint/formats/by_rank/test_meshes.py",
    "tests/checkpoint/formats/test_dcp.py",
    "tests/checkpoint/formats/test_dcp_layouts.py",
    "tests/checkpoint/formats/test_releases.py",
    "tests/checkpoint/formats/test_hugging_face.py",
    "tests/checkpoint/saving/test_async_save.py",
    "tests/checkpoint/tensors/test_dtensors.py",
    "tests/checkpoint/state/test_structure.py",
    "tests/storage/local/test_local.py",
)
"""What shows most of what a release can break, in about four minutes."""
WHOLE = os.environ.get("DTCKPT_MATRIX_TESTS") == "whole"

_NOT_FOR_TESTS = ("pyright", "ruff")
_WITHOUT_SETTINGS = {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
"""Variables by which pip forgets what caps releases for everything else that it installs here."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A Python and a torch."""

    python: str
    torch: str

    def __str__(self) -> str:
        return f"python{self.python}-torch{self.torch}"


PAIRS = (
    Pair("3.11", "2.11.0"),
    Pair("3.11", "2.14.1"),
    Pair("3.11", "2.15.0"),
    Pair("3.12", "2.13.0"),
    Pair("3.13", "2.13.0"),
)


def interpreters(version: str) -> Iterator[str]:
    """Yield what may be the interpreter of a version: on the path, or one of pyenv's."""
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python")))


def find_interpreter(version: str) -> str:
    """Return an interpreter of a version that really runs; NotAvailable where there is none."""
    told = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for path in interpreters(version):
        try:
            done = subprocess.run([path, "-c", told], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    raise NotAvailable(f"this machine has no python{version} that runs")


def requirements(torch: str) -> list[str]:
    """Return what the tests need, as pyproject.toml says, with one release of torch."""
    told: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    every = [*told["project"]["dependencies"], *told["dependency-groups"]["dev"]]
    others = [n for n in every if isinstance(n, str) and not n.startswith(_NOT_FOR_TESTS)]
    return [f"torch=={torch}", *(name for name in others if not name.startswith("torch>"))]


def constraints() -> list[str]:
    """Return the releases that this environment has of everything but torch, to take the same.

    An installer that has to find them by itself tries many releases of a cloud's libraries, which
    pin each other: minutes of search, or none that it accepts.
    """
    told = [sys.executable, "-m", "pip", "list", "--format=freeze"]
    done = subprocess.run(told, check=True, capture_output=True, text=True)
    own = ("torch==", "setuptools==", "pip==", "dtckpt==")
    return [line for line in done.stdout.split() if not line.startswith(own)]


def make_environment(pair: Pair, interpreter: str) -> Path:
    """Return the Python of the environment of a pair, which is made or brought up to date."""
    folder, needed = PLACE / str(pair), "\n".join(requirements(pair.torch))
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != needed:
        print(f"{pair}: installing into {folder} ...", flush=True)
        if not python.exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        limits = folder / "constraints.txt"
        limits.write_text("\n".join(constraints()))
        install(python, "--upgrade", "pip>=25.1")
        settings = install_torch(python, pair, limits)
        install(python, "--constraint", str(limits), *needed.split("\n"), **settings)
        stamp.write_text(needed)
    name_package(folder, python)
    return python


def name_package(folder: Path, python: Path) -> None:
    """Give an environment the command and the version of the package, which lies elsewhere."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = folder / "bin" / "dtckpt"
    command.write_text(f"#!{python}\nfrom dtckpt.tools.cli import main\n\nmain()\n")
    command.chmod(0o755)
    (packages,) = folder.glob("lib/python*/site-packages")
    told = packages / "dtckpt-0.dist-info" / "METADATA"
    told.parent.mkdir(exist_ok=True)
    told.write_text(f"Metadata-Version: 2.1\nName: dtckpt\nVersion: {version}\n")


def install_torch(python: Path, pair: Pair, limits: Path) -> dict[str, str]:
    """Install the torch of a pair, and return the variables with which pip could do so.

    With all its dependencies: builds for CUDA do not import without these. Raises NotAvailable
    where this machine gets no such release.
    """
    reason = ""
    for settings in ({}, _WITHOUT_SETTINGS):
        try:
            install(python, f"torch=={pair.torch}", "--constraint", str(limits), **settings)
        except NotInstalled as error:
            reason = next((line for line in str(error).split("\n") if "ERROR" in line), "")
        else:
            return settings
    raise NotAvailable(f"this machine gets no torch {pair.torch}: {reason}")


def run(pair: Pair, seconds: float) -> str:
    """Run the tests of a pair and return what came of it."""
    python = make_environment(pair, find_interpreter(pair.python))
    links = str(max(ROOT.glob("build/__editable__.dtckpt-*")))  # of the strict editable install
    if not WHOLE and (failed := exchange(python, links)):
        return failed
    choices = ["-n", "2", "--dist", "loadfile", *(["--no-loadscope-reorder"] if WHOLE else QUICK)]
    return run_tests(python, choices, seconds, PYTHONPATH=links)


def exchange(python: Path, links: str) -> str:
    """Export by the torch of an environment and load that by all others that are made.

    Returns what failed; empty where nothing did.
    """
    module = ("-m", "tests.checkpoint.exporting.exchange")
    made = sorted(stamp.parent for stamp in PLACE.glob("*/requirements.txt"))
    readers = [sys.executable, *(str(place / "bin" / "python") for place in made)]
    with tempfile.TemporaryDirectory() as folder:
        for reader, action in ((str(python), "write"), *((reader, "read") for reader in readers)):
            done = subprocess.run(
                [reader, "-W", "ignore", *module, action, folder],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": links if action == "write" else ""},
                check=False,
            )
            if done.returncode:
                return f"FAILED: {reader} cannot {action} an export of {python}"
    return ""


if __name__ == "__main__":
    sys.exit(run_each(PAIRS, run, str(__doc__), seconds=900))
