"""Tensors whose local part is still on its way: it is waited for when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.streams import Origin
from ..mesh.spec import DTensorSpec
from .wrapper import Wrapper, make_publicly

# The storage of the attribute that the class below guards.
_LOCAL: Any = vars(Wrapper)["local"]


class _Once:
    """Waits once, whoever asks, and remembers the answer."""

    def __init__(self, finish: Callable[[], Tensor], device: torch.device) -> None:
        self._finish = finish
        self._origin = Origin(device)
        self._inferring = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._local: Tensor | None = None

    def __call__(self) -> Tensor:
        with self._lock:
            if self._local is None:
                # As it began: what inference mode has made is written in it only.
                with torch.inference_mode(self._inferring):
                    self._local = self._origin.finish(self._finish)
                del self._finish  # which holds buffers
            return self._local


class Awaited(Wrapper):
    """A wrapper that becomes an ordinary one as soon as anything needs its local tensor."""

    _becomes: type[Wrapper]

    @property
    def local(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        held: Tensor | _Once = _LOCAL.__get__(self)
        if not isinstance(held, _Once):  # another thread has been here, or `swap_tensors` is
            return held
        local = held()
        _settle(self, local)
        return local

    @local.setter
    def local(self, value: Tensor | _Once) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if isinstance(value, _Once):  # of another tensor, by `torch.utils.swap_tensors`
            _LOCAL.__set__(self, value)
        else:
            _settle(self, value)

    _local_tensor = local  # pyright: ignore[reportAssignmentType]


def _settle(tensor: Any, local: Tensor) -> None:
    """Give a tensor its local part; it may have become an ordinary one in another thread."""
    _LOCAL.__set__(tensor, local)
    becomes: type[Wrapper] | None = vars(tensor).pop("_becomes", None)
    if becomes is not None:
        tensor.__class__ = becomes


def awaited(
    cls: type[Wrapper], finish: Callable[[], Tensor], spec: DTensorSpec, begun_on: torch.device
) -> Wrapper:
    """Return a wrapper of a class whose local tensor is what ``finish`` returns, later.

    It ends on the stream that is current now on the device where it was begun.
    """
    nothing = torch.empty(0, dtype=spec.dtype, device=spec.mesh.device)
    made = make_publicly(cls, nothing, spec, False)
    # In the place of the local part, so that whatever moves that moves what is waited for.
    _LOCAL.__set__(made, _Once(finish, begun_on))
    vars(made)["_becomes"] = cls
    made.__class__ = cls.awaited
    return made
