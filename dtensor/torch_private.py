"""Names of torch that it does not promise, all of them, each with what is done where it is missing.

Nothing else in the library names them (`tests/dtensor/test_torch_private.py` looks). What is found
here is decided when the module is imported or when a function is called, never by a release number
alone; every other way is run by a test.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


def found(path: str) -> Any:
    """Return what torch has under a dotted name below ``torch``; None where it has nothing."""
    at: Any = torch
    for name in path.split("."):
        at = getattr(at, name, None)
        if at is None:
            return None
    return at


_OUTSIDE = tuple(
    found(path)
    for path in ("_C._DisableTorchDispatch", "_C._DisableFuncTorch", "_C.DisableTorchFunction")
)
"""Contexts that take torch out of the modes that surround a call."""


def can_leave_modes() -> bool:
    """Whether `outside_modes` does what it says; if not, nothing that is made may be kept."""
    return None not in _OUTSIDE


@contextmanager
def outside_modes() -> Generator[None]:
    """Within it, new tensors are ordinary: no mode, transform or inference has a hand in them.

    For what outlives a call (`random/kept.py`).
    """
    with ExitStack() as stack:
        for context in _OUTSIDE:
            if context is not None:
                stack.enter_context(context())
        stack.enter_context(torch.inference_mode(False))
        yield


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor has a shape only: one on the meta device, or of a fake mode."""
    return tensor.is_meta or (type(tensor) is not Tensor and hasattr(tensor, "fake_mode"))


_NUM_MODES = found("_C._len_torch_dispatch_stack")


def has_modes() -> bool:
    """Whether some dispatch mode sees what operators do here; or nobody can tell."""
    return _NUM_MODES is None or _NUM_MODES() > 0


_GRAPH_TASK = found("_C._current_graph_task_id")


def in_backward() -> bool:
    """Whether this thread runs a backward pass.

    Where torch cannot tell it never does: activation checkpointing then draws other numbers when it
    runs a forward pass again, unless it is told how by ``random.replayed``.
    """
    return _GRAPH_TASK is not None and _GRAPH_TASK() != -1


def job_store() -> Any:
    """Return the store of the default process group; None where there is no way to it."""
    get = found("distributed.distributed_c10d._get_default_store")
    try:
        return None if get is None else get()
    except (RuntimeError, ValueError):
        return None


_TLS = tuple(
    found(path) for path in ("_C._stash_obj_in_tls", "_C._is_key_in_tls", "_C._get_obj_in_tls")
)


def hand_to_autograd(key: str, value: object) -> None:
    """Let threads in which autograd works for this one find a value.

    Where torch has no means, those threads find none: settings do not reach a backward pass on an
    accelerator.
    """
    if None not in _TLS:
        _TLS[0](key, value)


def handed_to_autograd(key: str) -> Any:
    """Return the value that this thread, or the one that autograd works for here, has handed on."""
    if None in _TLS or not _TLS[1](key):
        return None
    return _TLS[2](key)
