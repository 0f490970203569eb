"""``python leash.py FOLDER COMMAND...`` runs a program until its own standard input ends.

That happens when the process that started this one ends, even if it was killed. Then the program
and all that it has started are killed, and the folder is removed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress


def main() -> int:
    """Return how the program ended; 0 if it was ended."""
    folder, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while program.poll() is None:
            readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.2)
            if readable and not os.read(sys.stdin.fileno(), 1):
                return 0
        return program.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        if os.getppid() != _STARTED_BY:
            shutil.rmtree(folder, ignore_errors=True)


_STARTED_BY = os.getppid()


if __name__ == "__main__":
    sys.exit(main())
