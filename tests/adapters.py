"""Adapters against the released frameworks. Run by ``make test-adapters``.

Each framework has a virtual environment, made once, in ``.venv/adapters``: over ``.venv``, from
which torch and the tests come, with the release that is pinned here and what it needs beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = Path(sys.prefix) / "adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What a framework is tested with."""

    name: str
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    with_dependencies: bool = True
    """Whether what it needs brings what that needs; else all is listed, and no more is there."""


ADAPTERS = (
    Adapter(
        name="lightning",
        needs=("lightning==2.6.6",),
        tests=("tests/integrations/test_lightning.py",),
    ),
    Adapter(
        name="transformers",
        needs=("transformers==5.23.0", "accelerate==1.15.0"),
        tests=("tests/integrations/test_transformers.py",),
    ),
    Adapter(
        name="torchft",
        needs=("torchft==0.2.0",),
        tests=("tests/integrations/test_torchft.py",),
    ),
    Adapter(
        name="verl",
        needs=(
            "verl==0.9.1",
            "antlr4-python3-runtime==4.9.3",
            "cloudpickle==3.1.2",
            "codetiming==1.4.0",
            "datasets==4.7.0",
            "dill==0.4.1",
            "httpcore==1.0.9",
            "httpx==0.28.1",
            "msgpack==1.2.4",
            "multiprocess==0.70.19",
            "omegaconf==2.4.0",
            "orjson==3.13.0",
            "pandas==3.1.1",
            "peft==0.21.2",
            "pillow==13.0.0",
            "protobuf==7.36.2",
            "pyarrow==26.0.1",
            "pyvers==0.2.3",
            "ray==2.60.0",
            "sniffio==1.3.1",
            "tensordict==0.15.3",
        ),
        tests=("tests/integrations/test_verl.py",),
        with_dependencies=False,  # trackers, kernels, and servers of models
    ),
    Adapter(
        name="accelerate",
        needs=("accelerate==1.15.0",),
        tests=("tests/integrations/test_accelerate.py",),
    ),
    Adapter(
        name="torchtitan",
        needs=(
            "torchtitan==0.3.0",
            "spmd_types==0.2.3",
            "tyro==1.0.17",
            "typeguard==4.6.0",
            "docstring_parser==0.18.0",
            "torchdata==0.11.0",
        ),
        tests=("tests/integrations/test_torchtitan.py",),
        with_dependencies=False,  # data sets, tokenizers and trackers
    ),
)


def make_environment(adapter: Adapter) -> Path:
    """Return the Python of the environment of an adapter, which is made or brought up to date."""
    folder, needed = PLACE / adapter.name, "\n".join(adapter.needs)
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if stamp.exists() and stamp.read_text() == needed:
        return python
    print(f"{adapter.name}: installing into {folder} ...", flush=True)
    venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(venv, check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    below = Path(sys.prefix, "lib", version, "site-packages")
    above = folder / "lib" / version / "site-packages" / "below.pth"
    above.write_text(f"import site; site.addsitedir({str(below)!r})\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(_torch(folder))]
    if not adapter.with_dependencies:
        pip.append("--no-deps")
    with (folder / "install.log").open("w") as log:
        subprocess.run([*pip, *adapter.needs], check=True, stdout=log, stderr=log)
    stamp.write_text(needed)
    return python


def _torch(folder: Path) -> Path:
    """Write the one constraint: the torch that is there, of which others would bring another."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    path = folder / "constraints.txt"
    path.write_text("\n".join(line for line in pinned if line.startswith("torch==")))
    return path


def run(adapter: Adapter, seconds: float) -> str:
    """Run the tests of an adapter and return what came of it."""
    try:
        python = make_environment(adapter)
    except subprocess.CalledProcessError as error:
        print((PLACE / adapter.name / "install.log").read_text()[-4000:])
        return f"FAILED: cannot be installed ({error}), as the lines of pip above say"
    command = [str(python), "-m", "pytest", "-q", *adapter.tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DTCKPT_ADAPTER": adapter.name}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"FAILED: not over after {seconds:.0f} s"
    return "passed" if done.returncode == 0 else "FAILED"


def main() -> int:
    """Run the adapters, all or those named, and return 1 if some test failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    names = ", ".join(adapter.name for adapter in ADAPTERS)
    parser.add_argument("adapters", nargs="*", help=f"of {names}; all by default")
    parser.add_argument("--seconds", type=float, default=600, help="limit for each one's tests")
    options = parser.parse_args()
    results: dict[str, str] = {}
    for adapter in ADAPTERS:
        if not options.adapters or adapter.name in options.adapters:
            print(f"== {adapter.name}", flush=True)
            begun = time.monotonic()
            result = run(adapter, options.seconds)
            results[adapter.name] = f"{result} ({time.monotonic() - begun:.0f} s)"
    print("\n".join(f"{name}: {result}" for name, result in results.items()))
    return 1 if any("FAILED" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
