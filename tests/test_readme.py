"""The code in README.md runs, block after block, as a reader would paste it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# The last example makes a mesh, for which torch wants a process group of one rank.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def free_port() -> str:
    """A port that nobody uses just now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = PYTHON.findall(text)
    assert len(blocks) >= 5
    loop = next(block for block in blocks if "ckpt.latest" in block)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 16
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    env = os.environ | ONE_RANK | {"MASTER_PORT": free_port()}
    for _ in range(2):  # the second run finds what the first one saved
        run = subprocess.run(
            [sys.executable, "-W", "ignore", str(script)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        script.write_text(script.read_text().replace('"runs/example/', '"runs/example2/'))
    commands = [
        line
        for block in SHELL.findall(text)
        for line in block.replace("\\\n", "").splitlines()
        if line.startswith("dtckpt ")
    ]
    assert len(commands) == 3
    for command in commands:
        program = str(Path(sys.executable).with_name("dtckpt"))
        run = subprocess.run(
            command.replace("dtckpt ", f"{program} ", 1),
            cwd=tmp_path,
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
