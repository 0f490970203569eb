"""Processes that try operators: one that dies or never answers costs one operator, not the run."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any, cast

import torch

from .database import DATABASE, load
from .outcome import CRASH, DIVERGENT, HANG, Example, OpResult
from .team import Team
from .trial import Setting, try_operator

_FORKS = multiprocessing.get_context("forkserver")
# One process imports torch and its operators, all others are forked from that one.
_FORKS.set_forkserver_preload([__name__, DATABASE])

Task = tuple[str, str]
"""Sizes, and the name of an operator."""

Find = Callable[[str], Mapping[str, Any]]
"""Returns the operators by name for a choice of sizes; must be importable in other processes."""

_PARTED = {CRASH, HANG, DIVERGENT}

_PATIENCE = 300.0
"""Seconds after which a worker is given up."""


def names_of(sizes: str) -> list[str]:
    """Return the names of all operators. Raises NoDatabase where torch's cannot be imported."""
    with ProcessPoolExecutor(1, mp_context=_FORKS) as pool:
        return pool.submit(_names, sizes).result()


def _names(sizes: str) -> list[str]:
    return list(load(sizes))


def try_all(
    tasks: Sequence[Task], setting: Setting, jobs: int, find: Find = load
) -> Iterator[OpResult]:
    """Yield what came of every task, in the order they end."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    done: queue.SimpleQueue[OpResult | BaseException] = queue.SimpleQueue()
    for _ in range(min(jobs, len(tasks))):
        threading.Thread(target=_serve, args=(waiting, done, setting, find), daemon=True).start()
    for _ in tasks:
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        yield result


def _serve(
    waiting: queue.SimpleQueue[Task],
    done: queue.SimpleQueue[OpResult | BaseException],
    setting: Setting,
    find: Find,
) -> None:
    worker: _Worker | None = None
    try:
        while True:
            task = waiting.get_nowait()
            worker = worker or _Worker(setting, find)
            result = worker.try_one(task)
            if _PARTED & result.counts.keys():  # threads that still wait would disturb others
                worker.stop()
                worker = None
            done.put(result)
    except queue.Empty:
        if worker is not None:
            worker.stop()
    except BaseException as error:  # raised where the results are read
        done.put(error)


class _Worker:
    """A process that tries one operator at a time."""

    def __init__(self, setting: Setting, find: Find) -> None:
        self._pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_work, args=(theirs, setting, find), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("a worker process does not start; its error stands above") from error

    def try_one(self, task: Task) -> OpResult:
        """Return what came of a task; CRASH where the process died, HANG where it is silent."""
        try:
            self._pipe.send(task)
            if self._pipe.poll(_PATIENCE):
                return OpResult.from_json(self._pipe.recv())
        except (EOFError, OSError):
            self._process.join(5)
            return _lost(task, CRASH, f"the process ended with status {self._process.exitcode}")
        return _lost(task, HANG, f"no answer for {_PATIENCE:.0f} s")

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _unlock_cached_properties() -> None:
    """Take away the locks of cached properties in torch that are computed by collectives.

    Before Python 3.12 one lock is held for all instances: ranks that are threads of one process
    would wait for it, and the one that has it for them.
    """
    try:
        module = import_module("torch.nn.modules.linear_cross_entropy")
    except ModuleNotFoundError:  # before torch 2.13
        return
    for cls in [each for each in vars(module).values() if isinstance(each, type)]:
        for value in vars(cls).values():
            if isinstance(value, cached_property) and hasattr(value, "lock"):
                cast(Any, value).lock = nullcontext()


def _lost(task: Task, kind: str, text: str) -> OpResult:
    sizes, name = task
    example = Example(case="the whole operator", text=text)
    return OpResult(name=name, sizes=sizes, counts={kind: 1}, examples={kind: example})


def _work(pipe: Any, setting: Setting, find: Find) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _unlock_cached_properties()
    gc.freeze()  # the collector need not walk all of torch and its database again and again
    teams = {shape: Team(shape, setting.seconds) for shape in setting.meshes}
    pipe.send("ready")
    while True:
        try:
            sizes, name = pipe.recv()
        except EOFError:
            return
        # Says on stderr where the threads of a silent worker stand, before it is given up.
        faulthandler.dump_traceback_later(_PATIENCE / 3)
        pipe.send(try_operator(name, find(sizes)[name], sizes, setting, teams).to_json())
        faulthandler.cancel_dump_traceback_later()
