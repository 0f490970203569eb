"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("dtckpt", "torch", "torch_checkpointing", "safetensors", "xxhash", "numpy")


def describe(directory: str) -> dict[str, str | int | None]:
    """Return cores, memory, file system, system, versions and time of a run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "filesystem": _file_system(Path(directory)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _file_system(directory: Path) -> str:
    """Return the type of the file system that holds a directory."""
    place = directory.resolve()
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    holding = [(len(m[1]), m[2]) for m in mounts if place.is_relative_to(m[1])]
    return max(holding)[1] if holding else ""
