"""Copies that are made while the training goes on, a little with every gradient.

What changes in steps of optimizers only stays as it is during forward and backward passes. It is
copied in slices, from hooks that autograd calls when a gradient is there, in the thread that
trains: nothing else can then be about to write. What a step finds uncopied is copied before it
begins. Copies from a GPU run on a stream of their own from the beginning; the stream of the
training waits for them before a step.

That nothing was written in between is not believed but looked at (``witness.py``). Failures are
told to whoever waits for the copies, never to the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from dtckpt.errors import Cancelled, StateChanged, Timeout

from ...dtensor.geometry.box import Box
from ...dtensor.torch_private import outside_modes, storage_id
from .quiet import storages_of
from .steps import wait_for_step
from .witness import Witness

_SLICE_BYTES = 4 << 20
_MAX_HOOKS = 64
_WAIT_SECONDS = 0.05
"""How often who waits for the copies looks whether it still has to."""


class Spread:
    """Copies that wait to be made, and what makes them."""

    def __init__(self, witnesses: Sequence[Witness], trained: Sequence[torch.Tensor]) -> None:
        """``trained`` are parameters that get gradients."""
        self.changed: set[str] = set()
        """Names of the tensors that had changed when one was found to."""
        self.num_bytes = sum(witness.copy.source.nbytes for witness in witnesses)
        self.copied_bytes = 0
        self._witnesses = list(witnesses)
        self._on_devices = [w for w in witnesses if w.copy.source.is_cuda]
        on_host = [w for w in witnesses if not w.copy.source.is_cuda]
        self._parts = [(w, Box.whole(tuple(w.copy.source.shape))) for w in reversed(on_host)]
        """Of the tensors in host memory what is to be copied, the next one last."""
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._owner = threading.current_thread()
        self._lock = threading.RLock()  # a signal handler may come in between and wait for the end
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._moved_at = time.monotonic()
        self._storages = {storage_id(witness.copy.source) for witness in witnesses}
        self._hooks: list[Any] = []
        self._trained = _some_of(trained)
        host_bytes = sum(witness.copy.source.nbytes for witness in on_host)
        self._share = -(-host_bytes // max(len(self._trained), 1))

    def begin(self) -> None:
        """Launch copies from GPUs, and set the hooks that make the others."""
        self._launch()
        if not self._witnesses:
            self._settle()
            return
        hook = _on_gradient(ref(self))
        for parameter in self._trained:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._trained = []
        wait_for_step(self)

    def _launch(self) -> None:
        for device in {witness.copy.source.device for witness in self._on_devices}:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for witness in self._on_devices:
                    if witness.copy.source.device == device:
                        witness.copy.make()
                self._events[device] = event = torch.cuda.Event()
                event.record(stream)

    def on_gradient(self) -> None:
        """Copy the share of one gradient."""
        if not self._settled.is_set():
            self._advance(self._share)

    def before_step(self, optimizer: Optimizer) -> None:
        """Copy what is left if the step may change it."""
        if not self._settled.is_set():
            is_own = threading.current_thread() is self._owner
            if is_own or self._concerns(optimizer):
                self._advance(None)

    def let_go(self) -> bool:
        """Take the hooks away if nothing is left; return whether that is so.

        Called where no hooks of tensors run: they may not go while others of their tensor do.
        """
        if not self._settled.is_set() or threading.current_thread() is not self._owner:
            return self._settled.is_set() and not self._owner.is_alive()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return True

    def _concerns(self, optimizer: Optimizer) -> bool:
        return any(storage in self._storages for storage in storages_of(optimizer))

    def finish(self) -> None:
        """Copy what is left. The tensors may change then; a failure is told by ``wait``."""
        self._advance(None)

    def finish_if_own(self) -> None:
        """The same in the thread that began, or for it when it has ended; nothing in others.

        What they are about to write nobody here could know.
        """
        if threading.current_thread() is self._owner or not self._owner.is_alive():
            self.finish()

    def _advance(self, num_bytes: int | None) -> None:
        """Copy so much, or all there is. What goes wrong is kept, but for Ctrl-C."""
        with self._lock:
            if self._settled.is_set():
                return
            try:
                with outside_modes():
                    self._copy(num_bytes)
                    if num_bytes is None or not self._parts:
                        self._end(waits=num_bytes is None)
            except Exception as error:
                self._settle(error)
            except BaseException as error:
                self._settle(error)
                raise

    def _copy(self, num_bytes: int | None) -> None:
        done, parts = 0, self._parts
        while parts and (num_bytes is None or done < num_bytes):
            witness, box = entry = parts[-1]
            copy = witness.copy
            size = box.numel * copy.source.element_size()
            if size > _SLICE_BYTES and box.numel > 1:
                parts[-1:] = [(witness, half) for half in reversed(list(box.halves()))]
                continue
            self._require(witness, Witness.require_unmoved)
            copy.target[box.slices].copy_(copy.source[box.slices])
            self._require(witness, Witness.require_unwritten)
            if parts and parts[-1] is entry:  # else a signal handler has copied it, too
                parts.pop()
                self.copied_bytes += size
            done += size
            self._moved_at = time.monotonic()

    def _end(self, *, waits: bool) -> None:
        """End if the copies from GPUs are made, or from now on come before what may change them."""
        if not waits and not all(event.query() for event in self._events.values()):
            return
        for witness in self._on_devices:
            self._require(witness, Witness.require_unmoved)
            self._require(witness, Witness.require_unwritten)
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)
        self.copied_bytes += sum(witness.copy.source.nbytes for witness in self._on_devices)
        self._settle()

    def _require(self, witness: Witness, check: Callable[[Witness], None]) -> None:
        try:
            check(witness)
        except StateChanged:  # all at once, or as many saves would fail as there are tensors
            self.changed = {w.copy.name for w in self._witnesses if not _holds(w, check)}
            raise

    def _settle(self, error: BaseException | None = None) -> None:
        if not self._settled.is_set():
            self._failure = error
            self._parts.clear()
            self._settled.set()

    def abandon(self) -> None:
        """Copy nothing more, and return when nothing is being copied."""
        with self._lock:
            self._settle(Cancelled("the save was given up"))
            for event in self._events.values():
                event.synchronize()
            self._witnesses, self._on_devices = [], []
            self._events = {}

    def wait(self, on_wait: Callable[[], None], limit: float) -> None:
        """Wait for all copies; raise what they failed with.

        ``on_wait`` is called again and again, and raises to give up. Timeout once nothing was
        copied for ``limit`` seconds, StateChanged where a copy is not of what was there at the
        call.
        """
        while not self._settled.wait(_WAIT_SECONDS):
            on_wait()
            if time.monotonic() - self._moved_at > limit:
                raise Timeout(
                    f"{self.num_bytes - self.copied_bytes} bytes are still to be copied by a "
                    f"save with spread=True, and for {limit:g} s neither a backward pass nor "
                    "the step of an optimizer came to do it. Call handle.finish_staging() where "
                    "the training pauses, or save without spread"
                )
        if self._failure is not None:
            raise self._failure
        for event in self._events.values():
            event.synchronize()
        for witness in self._witnesses:
            self._require(witness, Witness.require_same)
        self._witnesses, self._on_devices = [], []  # which keep the tensors in memory


def _holds(witness: Witness, check: Callable[[Witness], None]) -> bool:
    try:
        check(witness)
    except StateChanged:
        return False
    return True


def _some_of(trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters that get a hook, from all over a model."""
    found = [one for one in trained if one.requires_grad and one.is_leaf]
    return found[:: -(-len(found) // _MAX_HOOKS) or 1]


def _on_gradient(spread: ref[Spread]) -> Callable[[torch.Tensor], None]:
    """Return a hook that does not keep copies alive that nobody waits for."""

    def hook(_: torch.Tensor) -> None:
        found = spread()
        if found is not None:
            found.on_gradient()

    return hook
