"""A process that writes files of a checkpoint for another one, which started it with a pipe.

It is started with SIGINT blocked, and ends with that one: a thread waits for the end of its
standard input, however that came about.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from dtckpt.errors import CheckpointError

from .work import Order, Work


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the parent is gone
    os._exit(1)


def _stop(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt  # the file that is being written is given up as elsewhere


def run(pipe: Connection) -> None:
    """Write files of the order that comes first, for each rank that comes, until the pipe ends."""
    try:
        order = pipe.recv()
        assert isinstance(order, Order)
        work = Work(order)
        work.on_read = lambda num_bytes: pipe.send(("read", num_bytes))
        work.plan()
        pipe.send(("ready", None))
        while (rank := pipe.recv()) is not None:
            pipe.send(("written", work.write(rank)))
        work.data.check_unchanged()
        pipe.send(("done", None))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # nobody waits for an answer
    except BaseException as error:
        pipe.send(("failed", _as_sent(error)))


def _as_sent(error: BaseException) -> BaseException:
    """Return an error as it arrives at the other end, which not all of them do."""
    try:
        copy: Any = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:
        pass
    return CheckpointError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, name="dtckpt-parent", daemon=True).start()
    run(Connection(int(sys.argv[1])))
