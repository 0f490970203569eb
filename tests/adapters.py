"""Adapters against the released frameworks. Run by ``make test-adapters``.

Each framework has a virtual environment, made once, in ``.venv/adapters``: over ``.venv``, from
which torch and the tests come, with the release that is pinned here and what it needs beside it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .environments import ROOT, install, run_each, run_tests

PLACE = Path(sys.prefix) / "adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What a framework is tested with."""

    name: str
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    with_dependencies: bool = True
    """Whether what it needs brings what that needs; else all is listed, and no more is there."""

    def __str__(self) -> str:
        return self.name


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
        name="vllm",
        needs=(
            "vllm==0.33.0",
            "apache-tvm-ffi==0.1.11",
            "cachetools==8.0.1",
            "cbor2==6.3.0",
            "cloudpickle==3.1.2",
            "compressed-tensors==0.17.0",
            "fastapi==0.136.3",
            "llguidance==1.9.1",
            "loguru==0.7.3",
            "msgspec==0.22.0",
            "openai==3.54.0",
            "oss-harmony==0.0.11",
            "partial-json-parser==0.2.1.1.post7",
            "pillow==13.0.0",
            "prometheus_client==0.26.0",
            "py-cpuinfo==9.0.0",
            "pybase64==1.5.1",
            "pyzmq==27.3.0",
            "sniffio==1.3.1",
            "starlette==1.10.0",
            "uvloop==0.23.0",
            "xgrammar==0.2.8",
        ),
        tests=("tests/integrations/test_vllm.py",),
        with_dependencies=False,  # kernels, which need a GPU, and another torch
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
    alone = () if adapter.with_dependencies else ("--no-deps",)
    install(python, "--constraint", str(_torch(folder)), *alone, *adapter.needs)
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
    python = make_environment(adapter)
    return run_tests(python, adapter.tests, seconds, DTCKPT_ADAPTER=adapter.name)


if __name__ == "__main__":
    sys.exit(run_each(ADAPTERS, run, str(__doc__), seconds=600))
