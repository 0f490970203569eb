"""Adapters against the frameworks themselves; each runs where its framework is installed.

``make test-adapters`` runs them, each in an environment with the release that is pinned there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def needs(framework: str) -> pytest.MarkDecorator:
    """Skip tests, by the name of what is missing, where a framework is not installed.

    So are those of a framework that is there for other tests: once is enough.
    """
    missing = importlib.util.find_spec(framework) is None
    return pytest.mark.skipif(
        missing or "DTCKPT_ADAPTER" not in os.environ,
        reason=f"{framework}: `make test-adapters` runs this in an environment of its own",
    )


def flip_a_bit(checkpoint: Path) -> None:
    """Damage every data file of a checkpoint, and what a killed save has left there."""
    for file in checkpoint.rglob("*.safetensors"):
        held = bytearray(file.read_bytes())
        if len(held) > 100:  # else of a save that was killed as it began
            held[-100] ^= 1
            file.write_bytes(held)


def run_page(name: str, folder: Path) -> None:
    """Run the code of a page, one block after the other, as its reader would paste it."""
    text = (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
    blocks = _BLOCK.findall(text)
    assert blocks
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=folder,
        env=alone,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
