"""Two network namespaces stand for two hosts, and a packet filter for a network that drops."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtckpt.checkpoint as dcp
from dtckpt.errors import NotCommitted

ROOT = Path(__file__).parents[3]


def tool(*words: str) -> None:
    """Run a system tool; CalledProcessError where it may not do that."""
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts with addresses 10.77.0.1 and 10.77.0.2."""
    for name in ("ip", "nft"):
        if shutil.which(name) is None:
            pytest.skip(f"two hosts need the command {name}, which this machine lacks")
    one, other = names = (f"dtckpt-a{os.getpid()}", f"dtckpt-b{os.getpid()}")
    made: list[str] = []
    try:
        try:
            for name in names:
                tool("ip", "netns", "add", name)
                made.append(name)
            tool(
                "ip",
                "link",
                "add",
                "v0",
                "netns",
                one,
                "type",
                "veth",
                "peer",
                "v0",
                "netns",
                other,
            )
            for number, name in enumerate(names, 1):
                tool("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "v0")
                tool("ip", "-n", name, "link", "set", "v0", "up")
                tool("ip", "-n", name, "link", "set", "lo", "up")
            tool("ip", "netns", "exec", one, "nft", "list", "ruleset")
        except subprocess.CalledProcessError as error:
            told = error.stderr.decode().strip()
            pytest.skip(f"this machine may not make network namespaces and filters: {told}")
        yield names
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def start(host: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank on a host."""
    environment = {"RANK": str(rank), "MASTER_ADDR": "10.77.0.1", "OMP_NUM_THREADS": "1"}
    command = [
        "ip",
        "netns",
        "exec",
        host,
        sys.executable,
        "-m",
        "tests.checkpoint.ranks.two_hosts",
    ]
    return subprocess.Popen([*command, str(folder)], cwd=ROOT, env=os.environ | environment)


def wait_for(path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait until a rank has said something."""
    limit = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < limit
        assert all(rank.poll() in (None, 0) for rank in ranks)
        time.sleep(0.01)


def test_a_network_that_drops_everything_fails_one_save(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    ranks = [start(host, rank, tmp_path) for rank, host in enumerate(hosts)]
    try:
        for rank in range(2):
            wait_for(tmp_path / f"cut-asked-{rank}", ranks)
        nft = ("ip", "netns", "exec", hosts[0], "nft")
        tool(*nft, "add table inet t; add chain inet t i { type filter hook input priority 0; }")
        tool(*nft, "add rule inet t i ip saddr 10.77.0.2 drop")
        (tmp_path / "cut-done").touch()
        for rank in range(2):
            wait_for(tmp_path / f"mended-asked-{rank}", ranks)
        tool(*nft, "delete table inet t")
        (tmp_path / "mended-done").touch()
        for rank in range(2):
            wait_for(tmp_path / f"ends-{rank}", ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    first, second = (json.loads((tmp_path / f"ends-{rank}").read_text()) for rank in range(2))
    assert first[0] == "10.77.0.1", "the address on the way to where the ranks met"
    assert first[1] == second[0] == first[5] == second[4] == "ok"
    assert "RankFailed: save: " in first[3]
    assert "rank 1 is lost: it showed no sign of life within 3 s" in first[3]
    assert "rank 0, which coordinates ranks 0-1, is lost: it showed no sign of life" in second[2]
    assert float(first[4]) < 30
    assert float(second[3]) < 30
    with pytest.raises(NotCommitted):
        dcp.open(tmp_path / "step-2")
    assert dcp.open(tmp_path / "step-3")["t"][...].tolist() == [3.0] * 10
