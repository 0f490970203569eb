"""Spawned ranks, for the few tests that need torch's default process group."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import NoReturn

import torch
import torch.distributed as dist

from .python import run_python


def run_processes(
    module: str, size: int, *args: str, compiler: bool = True, timeout: float = 180
) -> list[str]:
    """Run ``python -m module`` once per rank and return what each printed.

    One process imports the module and what it needs, calls its ``before_fork`` if it has one, and
    all ranks are forked from it. The module calls ``join_group`` first and ``leave_group`` last.
    ``compiler`` is that of ``run_python``.
    Raises AssertionError with the output of the ranks that fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        launched = run_python(
            *("-m", __name__, folder, size, timeout, module, *args),
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            compiler=compiler,
            timeout=timeout + 60,
        )
        assert launched.returncode == 0, launched.stdout + launched.stderr
        texts = [_output(folder, rank).read_text() for rank in range(size)]
    failed = [
        rank for rank, code in enumerate(json.loads(launched.stdout.splitlines()[-1])) if code
    ]
    told = "\n".join(f"rank {rank}:\n{texts[rank][-3000:]}" for rank in failed)
    assert not failed, told
    return texts


def _output(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.txt"


def _launch(folder: str, size: int, timeout: float, module: str) -> list[int]:
    """Fork all ranks and return the status of each."""
    prepare = getattr(import_module(module), "before_fork", None)  # with all that it imports
    if prepare is not None:
        prepare()
    sys.modules.pop(module)
    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "DTCKPT_TEST_INIT": f"file://{folder}/rendezvous",
            }
            _become_rank(module, _output(folder, rank))
        ranks[pid] = rank
    codes = _wait(set(ranks), timeout)
    return [codes[pid] for pid in ranks]


def _become_rank(module: str, output: Path) -> NoReturn:
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = 1
    try:
        run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(running: set[int], timeout: float) -> dict[int, int]:
    """Return how all have ended; once one has failed the others get a few seconds more."""
    deadline = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while running:
        late = time.monotonic() > deadline
        for pid in sorted(running):
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                running.discard(pid)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.05)
    return codes


def import_compiler() -> None:
    """Import what torch imports when it first compiles: a second or more of each rank."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(doubled, backend="aot_eager")(torch.ones(2, requires_grad=True))
    torch.compiler.reset()


def join_group(size: int | None = None, name: str = "") -> int:
    """Make the default Gloo group of the ranks of ``run_processes`` and return this one's rank.

    Or one of the first ``size`` ranks only, which they end themselves; each has another ``name``.
    """
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=os.environ["DTCKPT_TEST_INIT"] + name,
        rank=rank,
        world_size=size or int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    return rank


def leave_group() -> None:
    """End this rank well; nothing that follows is run.

    Without ``_exit`` torch's Gloo threads sometimes abort the interpreter as it winds down.
    """
    dist.barrier()
    dist.destroy_process_group()
    print("ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    _folder, _size, _timeout, _module, *sys.argv[1:] = sys.argv[1:]
    print(json.dumps(_launch(_folder, int(_size), float(_timeout), _module)))
