"""FSDP1 and ZeroRedundancyOptimizer of torch, whose state other ranks and one process load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp

from ..processes import run_processes
from .expected import WHOLE, make_model, make_optimizer, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two and four ranks saved, after others loaded it."""
    path = tmp_path_factory.mktemp("torch")
    run_processes("tests.frameworks.torch_ranks", 4, str(path))
    return path


@pytest.mark.parametrize(
    "place", ["sharded tensors", "original parameters", "dtensors", "full", "copies"]
)
def test_one_process_loads_what_fsdp1_saved(folder: Path, place: str) -> None:
    model, _ = trained(1, steps=1)
    dcp.load({"model": model}, folder / place, select="model")
    checkpoint = dcp.open(folder / place)
    for name, value in model.state_dict().items():
        assert checkpoint[f"model/{name}"][...].equal(value)
        assert checkpoint[f"optimizer/state/{name}/exp_avg"].shape == tuple(value.shape)
    assert dcp.verify(folder / place).problems == ()


def test_one_process_goes_on_with_what_owners_saved(folder: Path) -> None:
    expected, expected_optimizer = trained(0)
    model = make_model(1)
    optimizer = make_optimizer(model.parameters())
    dcp.load({"model": model, "optimizer": optimizer}, folder / "owners")
    for param, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.equal(wanted)
        state = optimizer.state[param]
        assert state.keys() == expected_optimizer.state[wanted].keys()
        assert all(torch.equal(state[k], v) for k, v in expected_optimizer.state[wanted].items())
    owners = {
        tuple(tensor.layout.all_ranks())
        for name, tensor in dcp.open(folder / "owners").items()
        if name.startswith("optimizer/")
    }
    assert owners == {(0,), (1,)}, "each part of the state is that of one rank"


def test_one_process_loads_what_megatron_fsdp_cut(folder: Path) -> None:
    model = {name: torch.zeros_like(value) for name, value in WHOLE.items()}
    halves = [torch.zeros(4, 4), torch.zeros(6, 4)]
    for place in ("megatron uneven", "megatron other"):
        dcp.load({"model": model, "halves": halves}, folder / place)
        assert all(value.equal(WHOLE[name]) for name, value in model.items())
        assert torch.cat(halves).equal(WHOLE["rows"])
