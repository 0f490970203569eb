"""Tells who waits for it that an optimizer is about to change its parameters.

One hook for all optimizers, set once and for good: hooks must not come or go while others run.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...dtensor.torch_private import in_backward


class Waiting(Protocol):
    """Somebody who has something to do before parameters change."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Do it; raises nothing."""
        ...

    def let_go(self) -> bool:
        """Whether there is nothing more to wait for; called where no gradients come."""
        ...


_lock = threading.Lock()
_waiting: list[Waiting] = []
_has_hook = False


def wait_for_step(one: Waiting) -> None:
    """Have ``before_step`` called at the beginning of every optimizer's step, in any thread."""
    global _has_hook
    _tidy()
    with _lock:
        _waiting.append(one)
        if not _has_hook:
            register_optimizer_step_pre_hook(_before_step)
            _has_hook = True


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _waiting:
        return
    for one in tuple(_waiting):
        one.before_step(optimizer)
    _tidy()


def _tidy() -> None:
    if in_backward():  # of an optimizer that steps as gradients come
        return
    for one in tuple(_waiting):
        if one.let_go():
            with _lock:
                if one in _waiting:
                    _waiting.remove(one)


def _forget_in_child() -> None:
    # Saves under way are the parent's; its threads may have held the lock.
    global _lock
    _lock = threading.Lock()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget_in_child)
