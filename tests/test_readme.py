"""The code in README.md and of pages for new users runs, as a reader would paste it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.formats.makers import unpacked

from .python import run_python

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# As in a shell or a notebook: no launcher has told this process its rank.
ALONE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


# That the model of transformers is the one of Megatron whose checkpoint the page reads.
AFTER = {
    "docs/moving-in.md": """
expected = torch.load(f"{old}/expected.pt")["logits of 0 to 4"]
torch.testing.assert_close(llama(torch.arange(5).unsqueeze(0)).logits, expected)
assert int(step) == 1 and float(moments["exp_avg"]["lm_head.weight"].abs().max()) > 0
""",
    "docs/memory-tier.md": """
from dtckpt.storage import agent_status, stop_agent
ckpt.async_save({}, "runs/other").result()  # after the ones before
held = ckpt.committed_steps("peers://run-17")
assert [step.number for step in held] == [30] and newest().url == "peers://run-17/step-30"
assert stop_agent("run-17") and agent_status("run-17") is None
assert newest().name == "step-30" and "peers" not in newest().url
""",
}


@pytest.fixture
def agents() -> Iterator[Path]:
    """A directory for sockets of agents: their names are short."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "agents"


@pytest.mark.parametrize(
    ("page", "least_blocks", "least_commands"),
    [
        ("README.md", 5, 4),
        ("docs/costs.md", 3, 0),
        ("docs/guide.md", 10, 2),
        ("docs/job-state.md", 3, 0),
        ("docs/memory-tier.md", 1, 0),
        ("docs/moving-in.md", 5, 2),
        ("docs/storage.md", 1, 0),
    ],
)
def test_pages_run(
    page: str, least_blocks: int, least_commands: int, tmp_path: Path, agents: Path
) -> None:
    text = (ROOT / page).read_text()
    found = BLOCK.findall(text)
    blocks = [code for language, code in found if language == "python"]
    assert len(blocks) >= least_blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join([*blocks, AFTER.get(page, "")]))
    unpacked("megatron-core-0.16.1", tmp_path / "runs/megatron/iter_0000010")
    for _ in range(2 if page == "README.md" else 1):  # the second run finds what the first saved
        env = ALONE | {"DTCKPT_AGENT_DIR": str(agents)}
        run = run_python("-W", "ignore", script, cwd=tmp_path, env=env, timeout=120)
        assert run.returncode == 0, run.stderr
        script.write_text(script.read_text().replace('"runs/example/', '"runs/example2/'))
    commands = [
        line
        for language, block in found
        if not language
        for line in block.replace("\\\n", "").splitlines()
        if line.startswith("dtckpt ")
    ]
    assert len(commands) >= least_commands
    program = Path(sys.executable).with_name("dtckpt")
    for command in commands:
        run = run_python(program, *words(command, tmp_path)[1:], cwd=tmp_path)
        assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"


def words(command: str, folder: Path) -> list[str]:
    """Return the words that a shell makes of a command."""
    told = subprocess.run(
        f"printf '%s\\0' {command}", cwd=folder, shell=True, capture_output=True, check=True
    )
    return told.stdout.decode().split("\0")[:-1]


def test_the_first_loop_of_the_readme_is_short() -> None:
    blocks = [code for _, code in BLOCK.findall((ROOT / "README.md").read_text())]
    loop = next(block for block in blocks if "ckpt.latest" in block)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 16
