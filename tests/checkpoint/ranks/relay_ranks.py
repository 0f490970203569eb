"""Five processes in a line, each of which hands on to the next; one is killed meanwhile.

Run as a program by test_relay: prints how each rank ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtckpt.checkpoint.ranks import relay
from dtckpt.checkpoint.ranks.relay import Relay
from dtckpt.checkpoint.ranks.together import closing, ranks_of, together

from .plain_groups import Group

SIZE = 5
DECISION = b"".join(number.to_bytes(4, "big") for number in range(500_000))
_c10d: Any = dist


def run_rank(rank: int, folder: Path, victim: int, *, is_begun: bool) -> str:
    """Decide something long and then something short; return the error."""
    relay.FAN_OUT, relay.MOST_BYTES = 1, 0
    patched: Any = Relay
    give = patched._give

    def give_or_die(own: Relay, link: Any, frame: bytes) -> None:
        if rank == victim:
            if is_begun:
                give(own, link, frame[: len(frame) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        give(own, link, frame)

    patched._give = give_or_die
    group = Group(_c10d.FileStore(str(folder / "rendezvous"), SIZE), rank, SIZE)
    try:
        ranks = ranks_of(group, timeout=timedelta(seconds=30), purpose="load")
        with closing(ranks):
            told = together(ranks, "load: read manifest", lambda: b"", lambda _: DECISION)
            (folder / f"told{rank}").write_text(str(told == DECISION))
            together(ranks, "load: check", lambda: b"")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def main(victim: int, is_begun: bool) -> None:
    """Fork all ranks, wait for them and print what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), list[int]()
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                note = run_rank(rank, folder, victim, is_begun=is_begun)
                (folder / f"note{rank}").write_text(note)
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        kinds = ("told", "note")
        found = {p.name: p.read_text() for kind in kinds for p in folder.glob(f"{kind}*")}
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "begun")
