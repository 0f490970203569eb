"""The DTensors people have today: FSDP2, tensor parallel, HSDP, and ours, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import Layout, Shard

from ..processes import run_processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks wrote, after they checked loads on other meshes."""
    path = tmp_path_factory.mktemp("fsdp")
    outputs = run_processes("tests.checkpoint.fsdp_ranks", 4, str(path))
    assert all(output.endswith("ok\n") for output in outputs)
    return path


def test_one_process_reads_what_four_wrote(folder: Path) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    checkpoint = dcp.open(folder / "step-3")
    assert set(checkpoint) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint[name][...], tensor)


def test_the_hidden_shard_order_is_stored_openly(folder: Path) -> None:
    layout = dcp.open(folder / "step-3")["model/up.weight"].layout
    assert isinstance(layout, Layout)
    assert layout.placements == (Shard(0, order=1), Shard(0, order=0))
    assert layout.mesh.axis_names == ("dp", "tp")


def test_the_result_is_intact_and_reshards_offline(folder: Path) -> None:
    from dtckpt.dtensor import Mesh

    assert dcp.verify(folder / "step-3").problems == ()
    rules = dcp.parse_rules("*p.weight=S(0),S(1); *n.weight=S(1),S(0); optim/*/exp_avg*=S(0),R")
    dcp.reshard(folder / "step-3", folder / "step-4", Mesh.parse("a=3,b=2"), rules)
    old, new = dcp.open(folder / "step-3"), dcp.open(folder / "step-4")
    for name, tensor in old.items():
        assert torch.equal(tensor[...], new[name][...])
    assert new.state_dict()["step"] == 3
