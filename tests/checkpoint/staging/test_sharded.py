"""Saves with ``spread=True`` of models that are sharded, by torch's ``fully_shard`` and ours."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from dtckpt.dtensor import DeviceMesh
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import run_on_mesh
from ...processes import run_processes
from .sharded import Sharded, check_all


def test_sharded_by_torch(tmp_path: Path) -> None:
    outputs = run_processes("tests.checkpoint.staging.spread_ranks", 2, str(tmp_path))
    assert all("all well" in output for output in outputs)


def test_sharded_by_ours() -> None:
    store = MemoryStore()

    def body(mesh: DeviceMesh) -> None:
        shard: Any = partial(fully_shard, mesh=mesh)
        check_all(partial(Sharded, shard, mesh.get_group()), store)

    run_on_mesh((2,), body, ("dp",))
