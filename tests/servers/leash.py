"""``python leash.py FOLDER COMMAND...`` runs a program until its own standard input ends.

That happens when the process that started this one ends, even if it was killed. Then, as when it is
told to end itself, the program and all that it has started are killed, and the folder is removed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Return how the program ended; 0 if it was ended."""
    folder, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    signal.signal(signal.SIGTERM, _end)
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
    )
    is_ended = True
    try:
        while program.poll() is None:
            readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.2)
            if readable and not os.read(sys.stdin.fileno(), 1):
                return 0
        is_ended = False
        return program.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        if is_ended:  # else somebody may want to read what the program has said
            shutil.rmtree(folder, ignore_errors=True)


def _end(*_: object) -> None:
    sys.exit(0)


def _die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
