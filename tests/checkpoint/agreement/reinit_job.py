"""Ranks of which some leave and come back, in the same processes; run by ``run_processes``.

The group is destroyed and made anew with another size. What is asked of the new agreement is
answered by it, and the old ones end without a hang, closed or not, when their store is gone.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.agreement.agreement import Agreement

TIMEOUT = timedelta(seconds=30)
_c10d: Any = dist


def part(root: str, size: int, rank: int, store: Any, *, closes_late: bool) -> Agreement:
    """Train over a group of the first ranks until what one of them is asked for has been saved."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    state: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    found = dcp.latest(root)
    if found is not None:
        dcp.load(state, found.url)
    agreement = Agreement(poll=timedelta(milliseconds=20), timeout=TIMEOUT)
    if rank == size - 1:
        agreement.ask("asked")
    while (agreed := agreement.at_call()) is None:
        state["step"] += 1
        state["w"] += 1
        dist.all_reduce(torch.ones(1))
    dcp.save(state, f"{root}/step-{state['step']}")
    print("saved", size, state["step"], agreed, state["w"].tolist() == [float(state["step"])] * 4)
    dist.barrier()
    if not closes_late:
        agreement.close()
    dist.destroy_process_group()
    return agreement


def store_of(port: Path, rank: int) -> Any:
    """Return a store that the first rank serves, and that says in a file where."""
    if rank == 0:
        host = _c10d.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, False)
        port.with_suffix(".new").write_text(str(host.port))
        port.with_suffix(".new").rename(port)
        return host
    while not port.exists():
        time.sleep(0.01)
    return _c10d.TCPStore("127.0.0.1", int(port.read_text()), None, False)


def main(root: str) -> None:
    rank = int(os.environ["RANK"])
    agreements: list[Agreement] = []
    for number, size in enumerate((3, 2, 3)):
        if rank < size:  # each store ends with its group, which the one before has done by now
            store = store_of(Path(f"{root}.{number}"), rank)
            agreements.append(part(root, size, rank, store, closes_late=number % 2 == 0))
            del store
    for agreement in agreements:
        agreement.ask("nobody hears it")
        agreement.close()
    print("ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
