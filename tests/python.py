"""Programs in Pythons of their own, which have torch from the start.

Importing torch takes seconds of processor time, and what dtckpt needs of its distributed part half
as much again, and so does what every optimizer imports. One process does it for all programs of a
test run, and each program is forked from that one. It has imported nothing of dtckpt, which a
program finds as any other does: with the environment that it is given.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]

IMPORTS = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""What programs find imported."""

COMPILER = "torch._dynamo"
"""What most of them find imported, too: torch does so at the first step of an optimizer."""

LEAKS = re.compile(
    r"^(nanobind: (leaked|this is likely) | - (leaked|\.\.\.) |See https://nanobind).*(\n|$)",
    re.MULTILINE,
)
"""What triton, which the compiler of torch 2.15 imports, says at the end of any program."""

_PR_SET_CHILD_SUBREAPER = 36


def run_python(
    *arguments: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    compiler: bool = True,
    timeout: float = 180,
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments as on a command line: ``-W``, then ``-c``, ``-m`` or a file.

    OpenMP has one thread. ``env`` is the whole environment; ``compiler`` says whether ``COMPILER``
    is imported. What the program has begun and left is killed. Raises TimeoutError, with what it
    has written, where it takes too long.
    """
    words = [*map(str, arguments)]
    request = {"arguments": words, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with theirs:
            ends = [theirs.fileno(), out.fileno(), errors.fileno()]
            socket.send_fds(_torch_process(compiler), [json.dumps(request).encode()], ends)
        with ours.makefile() as told:
            begun = told.readline()
            assert begun, "the process that has torch has ended; its error stands on stderr"
            pid = int(begun)
            ours.settimeout(timeout)
            late = False
            try:
                code = int(told.readline())
            except TimeoutError:
                code, late = -signal.SIGKILL, True
            finally:
                with suppress(ProcessLookupError):  # of none that has not ended
                    os.killpg(pid, signal.SIGKILL)
        texts: list[str] = []
        for file in (out, errors):
            file.seek(0)
            texts.append(LEAKS.sub("", file.read().decode()))
    if late:
        raise TimeoutError(f"no end after {timeout} s: {words}\n" + "\n".join(texts))
    return subprocess.CompletedProcess(words, code, *texts)


@cache
def _torch_process(compiler: bool) -> socket.socket:
    """Start the process that all are forked from; it ends when nobody has this socket."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *IMPORTS, *[COMPILER][:compiler]],
            cwd=ROOT,
            # Threads of before a fork would be missing after it.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # the last registered is the first to run
    return ours


def _next_program(requests: socket.socket) -> Any:
    """Fork a process for every request, in which this returns; the others never leave."""
    while True:
        data, ends, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            # What the program leaves comes here instead of to the first process of the machine, and
            # its processor time to that of the test.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            pid = os.fork()
            if pid == 0:
                return _begun(json.loads(data), ends)
            with socket.socket(fileno=ends[0]) as caller, suppress(BrokenPipeError):
                caller.sendall(f"{pid}\n".encode())
                caller.sendall(f"{_ended(pid)}\n".encode())
            with suppress(ChildProcessError):  # when there is none
                while True:
                    os.wait()
            os._exit(0)
        for end in ends:
            os.close(end)
        with suppress(ChildProcessError):  # when there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _ended(pid: int) -> int:
    """Wait for the end of a process, and of those that it leaves until then."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _begun(request: Any, ends: list[int]) -> Any:
    """Become the process of a program, all but the program itself."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for end, stream in zip((nothing, *ends[1:]), range(3), strict=True):
        os.dup2(end, stream)
    for end in {nothing, *ends} - {0, 1, 2}:
        os.close(end)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return request["arguments"]


if __name__ == "__main__":
    gc.disable()  # as it would walk the modules that have come so far again and again
    for _name in sys.argv[1:]:
        import_module(_name)
    gc.collect()
    gc.freeze()
    gc.enable()
    _words = _next_program(socket.socket(fileno=0))
    while _words[0] == "-W":
        sys.warnoptions.append(_words[1])
        warnings.simplefilter(_words[1])
        del _words[:2]
    if _words[0] == "-c":
        sys.argv[:], sys.path[0] = ["-c", *_words[2:]], ""
        _launcher = sys.modules["__main__"]  # which is to outlive this line
        sys.modules["__main__"] = ModuleType("__main__")
        exec(_words[1], vars(sys.modules["__main__"]))
    elif _words[0] == "-m":
        sys.argv[:], sys.path[0] = _words[1:], os.getcwd()
        runpy.run_module(_words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = _words, str(Path(_words[0]).parent)
        runpy.run_path(_words[0], run_name="__main__")
