"""The page of the command is what the commands say, and its examples run."""

from __future__ import annotations

import glob
import shutil
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import Mesh
from dtckpt.tools.cli.command import SECTIONS

from .conftest import Run
from .reference import PAGE, examples, page

FINDS_SOMETHING = ("diff",)
"""Commands whose examples exit with 1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples are about."""
    root = tmp_path_factory.mktemp("examples")
    rules = dcp.parse_rules("model/*weight=S(0),S(1); *=R,R")
    mesh = Mesh.parse("dp=2,tp=2")
    generator = torch.Generator().manual_seed(1)
    with dcp.CheckpointManager(root / "plain") as manager:
        for step in (100, 200, 300):
            model = {
                f"layers.{i}.{name}": torch.randn(*shape, generator=generator)
                for i in range(2)
                for name, shape in {"mlp.weight": (16, 8), "norm.bias": (8,)}.items()
            }
            model |= {
                "embed.weight": torch.zeros(32, 8),
                "weight": torch.ones(8, 8),
                "bias": torch.ones(8),
            }
            state = {"model": model, "step": step, "lr": 0.1}
            manager.save(step, state)
    for step in (100, 200, 300):
        name = f"step-{step}"
        dcp.reshard(root / "plain" / name, root / "run" / name, mesh, rules)
        shutil.copy(root / "plain" / f"{name}.json", root / "run")
    dcp.reshard(root / "plain" / "step-200", root / "other", mesh, rules)
    dcp.export(root / "run" / "step-300", root / "hf", part="model")
    dcp.export(root / "run" / "step-300", root / "dcp", format="dcp")
    shutil.rmtree(root / "plain")
    return root


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "make cli-page writes it"


def test_every_command_has_examples() -> None:
    names = {name for modules in SECTIONS.values() for name in modules}
    assert {name for name, _ in examples()} == names


def test_help_holds_80_columns() -> None:
    assert max(map(len, page().partition("```")[2].splitlines())) <= 80


@pytest.mark.parametrize(("name", "args"), [*examples()])
def test_examples_run(
    run: Run,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    args: list[str],
) -> None:
    place = shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    expanded = [found for arg in args for found in (sorted(glob.glob(arg)) or [arg])]
    result = run(*expanded)
    assert result.exit_code == (1 if name in FINDS_SOMETHING else 0), result.output
