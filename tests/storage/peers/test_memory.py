"""How much memory an agent may take, of a host or of a container with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtckpt.storage.peers.agent import memory

GIB = 1 << 30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container that may have 100 GiB of a host with 1,000, and uses 90."""
    meminfo = f"MemTotal: {1000 << 20} kB\nMemFree: 0 kB\nMemAvailable: {900 << 20} kB\n"
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "memory.max").write_text(f"{100 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{90 * GIB}\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    files = str(tmp_path / "memory.max"), str(tmp_path / "memory.current")
    monkeypatch.setattr(memory, "_CGROUPS", (files,))
    return tmp_path


def test_the_limit_of_a_container_counts(container: Path) -> None:
    assert memory.total_bytes() == 100 * GIB
    assert memory.free_bytes() == 5 * GIB  # and a twentieth is never taken
    (container / "memory.max").write_text("max\n")
    assert (memory.total_bytes(), memory.free_bytes()) == (1000 * GIB, 850 * GIB)


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_pages_of_files_are_free(container: Path, prefix: str) -> None:
    told = {"anon": 20, f"{prefix}inactive_file": 60, f"{prefix}active_file": 10}
    if prefix:
        told |= {"inactive_file": 1, "active_file": 1}  # without the groups below
    lines = "".join(f"{name} {size * GIB}\n" for name, size in told.items())
    (container / "memory.stat").write_text(lines)
    assert memory.free_bytes() == 75 * GIB
