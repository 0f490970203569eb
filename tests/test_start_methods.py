"""Processes that are neither forked nor told how to start, as Python 3.14 starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .python import run_python

SCRIPT = """
import datetime, multiprocessing, os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh, Shard, distribute_tensor, init_device_mesh

PLACE = sys.argv[1]
WHOLE = torch.arange(40.0).view(10, 4)


def rank_main(rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{PLACE}/rendezvous", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(WHOLE, mesh, [Shard(0)]), "step": 3}
    ckpt.async_save(state, f"{PLACE}/run").result()
    state["w"].to_local().zero_()
    ckpt.load(state, f"{PLACE}/run")
    assert torch.equal(state["w"].full_tensor(), WHOLE)
    dist.barrier()
    os._exit(0)


class Rows(torch.utils.data.Dataset):
    def __init__(self, *sources):
        self.sources = sources

    def __len__(self):
        return len(WHOLE)

    def __getitem__(self, index):
        return [rows[index] for rows in self.sources]


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    # Of no effect on other methods. All that is ours is still imported where it is needed.
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor"])
    ranks = [multiprocessing.Process(target=rank_main, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    ckpt.reshard(
        f"{PLACE}/run", f"{PLACE}/new", Mesh.parse("a=4"), ckpt.parse_rules("*=S(0)"), processes=2
    )
    opened = ckpt.open(f"{PLACE}/new")
    rows = Rows(opened["w"], opened.state_dict()["w"])
    read = [*DataLoader(rows, batch_size=5, num_workers=2)]
    for parts in zip(*read, strict=True):
        assert torch.equal(torch.cat(parts), WHOLE)
    print("done")
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ranks_and_readers_start_in_other_ways_than_by_fork(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_python("-W", "error", script, tmp_path, method, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
