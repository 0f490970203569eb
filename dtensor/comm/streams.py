"""Streams of accelerators: work is queued on the one that is current, and memory belongs to one.

The one place that names them. What is begun on one stream and used on another must be ended where
it began: buffers of communication go back to their stream as soon as nobody holds them, and that
stream would write to them again while another one still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import UnsupportedOp

from .devices import module_of


class Origin:
    """The stream on which some work was begun; of no consequence on devices without streams."""

    __slots__ = ("_device", "_stream")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _current(device)

    def finish(self, run: Callable[[], Tensor]) -> Tensor:
        """Run what ends the work where it began, and return its result for the current stream.

        That waits for it on the device; the memory stays until both streams are done with it.
        """
        current = _current(self._device)
        if self._stream is None or current == self._stream:
            return run()
        with module_of(self._device).stream(self._stream):
            made = run()
        current.wait_stream(self._stream)
        if made.device == self._device:
            made.record_stream(current)
        return made


class SideStream:
    """A stream for communication beside computation; on devices without streams there is none."""

    __slots__ = ("_device", "_stream")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @contextmanager
    def queued(self, after: Any = None) -> Generator[None]:
        """Queue here what the block does, once what the current stream has now is done.

        ``after`` is an event to wait for instead of that. Without streams the event is waited for.
        """
        current = _current(self._device)
        if current is None:
            if after is not None:
                after.synchronize()
            yield
            return
        module = module_of(self._device)
        if self._stream is None:
            self._stream = module.Stream(self._device)
        if after is None:
            self._stream.wait_stream(current)
        else:
            self._stream.wait_event(after)
        with module.stream(self._stream):
            yield

    @contextmanager
    def resumed(self, made: Callable[[], Iterable[Tensor]]) -> Generator[None]:
        """Queue here what the block does, without a wait; the current stream waits for its end.

        The memory of what it has ``made`` stays until both streams are done with it.
        """
        current = _current(self._device)
        if current is None or self._stream is None:
            yield
            return
        with module_of(self._device).stream(self._stream):
            yield
        current.wait_stream(self._stream)
        for tensor in made():
            if tensor.device == self._device:
                tensor.record_stream(current)


def _current(device: torch.device) -> Any:
    """Return the current stream of a device in this thread; None where it has none."""
    if device.type in ("cpu", "meta"):
        return None
    module = module_of(device)
    if module is None or not hasattr(module, "current_stream") or not hasattr(module, "stream"):
        return None
    return module.current_stream(device)


def refuse_capture(device_type: str) -> None:
    """Raise UnsupportedOp where the work of the current stream is captured as a graph."""
    if device_type == "cpu":
        return
    module = module_of(torch.device(device_type))
    if getattr(module, "is_current_stream_capturing", bool)():
        raise UnsupportedOp(
            f"random numbers of a mesh of {device_type} within a graph capture: each replay of the "
            "graph would repeat the numbers that were drawn now. Draw them before the graph, into "
            "a tensor that it reads, or leave what draws out of the capture"
        )
