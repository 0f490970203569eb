"""Mixture-of-experts models of transformers under tensor parallelism, and FSDP outside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import Layout, Mesh, Packed

from ..processes import run_processes
from .tiny_models import CONFIGS, pretrained, write_pretrained

RANKS = "tests.frameworks.transformers_ranks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks saved, after those on other meshes loaded it."""
    path = tmp_path_factory.mktemp("transformers")
    write_pretrained(path)
    runs = [
        ({"tp_size": 2}, "tp2", ["tp2"]),
        ({"tp_size": 2, "fsdp_size": 2}, "fsdp2-tp2", ["tp2", "fsdp2-tp2"]),
        ({"tp_size": 4}, "tp4", ["tp2", "fsdp2-tp2", "tp4"]),
        ({"tp_size": 2, "fsdp_size": 2}, None, ["tp4"]),
        ({"tp_size": 2}, None, ["fsdp2-tp2", "tp4"]),
    ]
    run_processes(RANKS, 4, str(path), json.dumps(runs))
    return path


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("source", ["tp2", "fsdp2-tp2", "tp4"])
def test_one_process_loads_what_ranks_saved(folder: Path, name: str, source: str) -> None:
    model: Any = pretrained(folder, name)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    dcp.load({"model": model}, folder / source / name)
    for key, value in model.state_dict().items():
        assert value.equal(wanted[key]), key


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_are_named_in_the_checkpoint_and_cut_anew_offline(folder: Path, name: str) -> None:
    checkpoint = dcp.open(folder / "tp2" / name)
    packed = {
        key: tensor.layout.placements
        for key, tensor in checkpoint.items()
        if isinstance(tensor.layout, Layout)
        and any(isinstance(p, Packed) for p in tensor.layout.placements)
    }
    assert packed
    assert dcp.verify(folder / "tp2" / name).problems == ()
    target = folder / "resharded" / name
    dcp.reshard(folder / "tp2" / name, target, Mesh.parse("a=3"), dcp.parse_rules("*=S(0)"))
    again = dcp.open(target)
    for key in packed:
        assert again[key][...].equal(checkpoint[key][...])
