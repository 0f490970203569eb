"""One rank on a host of its own: saves, while the network between the hosts is cut and mended.

Run as a program by test_two_hosts, in a network namespace for each rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.addresses import listen
from dtckpt.errors import CheckpointError


class WaitsFor:
    """A component of the state that asks for the network to be changed and waits until it is."""

    def __init__(self, folder: Path, word: str) -> None:
        self.folder = folder
        self.word = word

    def state_dict(self) -> dict[str, int]:
        (self.folder / f"{self.word}-asked-{os.environ['RANK']}").touch()
        while not (self.folder / f"{self.word}-done").exists():
            time.sleep(0.01)
        return {"x": 1}

    def load_state_dict(self, _: object) -> None:
        raise NotImplementedError


def main(folder: Path) -> None:
    """Save three times: on a whole network, on one that is cut meanwhile, and again."""
    rank = int(os.environ["RANK"])
    c10d: Any = dist  # torch's stubs leave out the stores
    store = c10d.TCPStore(os.environ["MASTER_ADDR"], 29500, 2, is_master=rank == 0)

    class Group:
        """Ranks and a store; saving needs no more."""

        def rank(self) -> int:
            return rank

        def size(self) -> int:
            return 2

        def get_group_store(self) -> object:
            return store

    group, ends = Group(), list[str]()
    if rank == 0:
        hosts, sockets = listen(2)
        ends.append(",".join(hosts))
        for made in sockets:
            made.close()
    for number, word in ((1, ""), (2, "cut"), (3, "mended")):
        state: dict[str, object] = {"t": torch.full((10,), float(number))}
        began = time.monotonic()
        if word == "mended":
            WaitsFor(folder, word).state_dict()
            began = time.monotonic()
        elif word:
            state["c"] = WaitsFor(folder, word)
        timeout = timedelta(seconds=3 if word == "cut" else 60)
        try:
            dcp.save(state, folder / f"step-{number}", process_group=group, timeout=timeout)
            ends.append("ok")
        except CheckpointError as error:
            ends.append(f"{type(error).__name__}: {error}")
        ends.append(f"{time.monotonic() - began:.1f}")
    (folder / f"rank-{rank}").write_text(json.dumps(ends))
    (folder / f"rank-{rank}").rename(folder / f"ends-{rank}")  # never seen half written
    while not all((folder / f"ends-{r}").exists() for r in range(2)):
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
