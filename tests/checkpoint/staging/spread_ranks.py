"""Two ranks with torch's ``fully_shard``; run by test_sharded, one process per rank."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtckpt.storage import LocalStore

from ...processes import join_group, leave_group
from .sharded import Sharded, check_all


def main(path: str) -> None:
    """Check what holds for sharded models."""
    join_group()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shard: Any = partial(fully_shard, mesh=mesh)
    check_all(partial(Sharded, shard, None), LocalStore(path))
    print("all well")
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
