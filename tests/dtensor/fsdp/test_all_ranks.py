"""Without a mesh, modules are sharded over all ranks of the job, or on this process alone."""

from __future__ import annotations

from tests.processes import run_processes
from tests.python import run_python

ALONE = """
import torch
from dtckpt.dtensor.fsdp import fully_shard

model = fully_shard(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
mesh = model.weight.device_mesh
assert mesh.shape == (1,) and torch.distributed.get_world_size() == 1
assert model.weight.grad.full_tensor().tolist() == [[1.0] * 3] * 2
"""


def test_fully_shard_without_a_mesh_takes_all_ranks() -> None:
    run_processes("tests.dtensor.fsdp.all_ranks", 2)


def test_fully_shard_without_a_mesh_initialises_torch_distributed() -> None:
    ended = run_python("-c", ALONE)
    assert ended.returncode == 0, ended.stderr
