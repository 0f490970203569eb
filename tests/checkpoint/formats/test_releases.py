"""Checkpoints that releases of torch wrote, from 2.2 on, and that are kept in ``tests/data``.

``makers/make_torch.py`` has written them, with each torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Shard, distribute_tensor

from ...dtensor.rank_meshes import run_on_mesh
from .makers import make_torch, unpacked
from .test_dcp import same, whole

RELEASES = ("2.2.2", "2.13.0", "2.14.1", "2.15.0")


@pytest.fixture(params=RELEASES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return what a torch has written."""
    return unpacked(f"torch-{request.param}", tmp_path)


def test_a_folder_of_dcp(written: Path) -> None:
    found = whole(ckpt.open(written / "dcp").state_dict())
    assert same(found, {"model": make_torch.tensors(), **make_torch.plain()})
    assert ckpt.verify(written / "dcp").problems == ()


def test_files_of_each_rank_with_their_meshes(written: Path) -> None:
    found = whole(ckpt.open(written / "ranks").state_dict())
    assert same(found, {"model": make_torch.tensors()})


@pytest.mark.parametrize("folder", ["dcp", "ranks"])
def test_they_load_on_another_mesh(written: Path, folder: str) -> None:
    def body(mesh: Any) -> None:
        wanted = make_torch.tensors()
        into = {
            "model": {
                name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)])
                for name, value in wanted.items()
            }
        }
        ckpt.load(into, written / folder, select=["model"], process_group=mesh.get_group())
        for name, value in wanted.items():
            assert same(into["model"][name].full_tensor(), value), name

    run_on_mesh((3,), body)
