"""Which module the work of a thread belongs to: forward, backward, or computed once more.

In the forward pass it is the innermost module that is being called. The nodes of autograd are
numbered as they are made, so a node that runs in the backward pass belongs to the module in whose
call its number was given; no hooks on tensors are needed. A module that is called while a node runs
computes what activation checkpointing has thrown away.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..comm.traffic import ask_for_owner, working_thread
from ..torch_private import (
    backward_node,
    hand_to_autograd,
    handed_to_autograd,
    next_node_number,
    node_number,
)

Phase = Literal["forward", "backward", "recomputation"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputation")

GLOBAL = "Global"
"""In place of a module: what happens outside of any; as a row, all there is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a model, and in its training step, something happened."""

    module: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """A module that was called, or a part of one."""

    name: str
    kind: str
    parameters: dict[str, Any]
    """The parameters of the module itself, by their last name."""


class ModuleTracker:
    """Follows the calls of modules in one thread, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleInfo] = {}
        """In the order of the models, parts after the whole."""
        self._names: dict[int, str] = {}
        self._owner_of_parameter: dict[int, str] = {}
        self._kept: list[nn.Module] = []
        """What the numbers above stand for stays alive, so that they do."""
        self._calls: list[str] = []
        self._recomputed: list[str] = []
        self._numbers: list[int] = []
        self._modules_at: list[str] = []
        """From a number of ``_numbers`` on, up to the next one, nodes are made by this module."""
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Begin to follow this thread, and the threads of autograd that work for it."""
        mark_thread()
        _follow(self)
        self._note_change()

    def stop(self) -> None:
        """End it."""
        _unfollow(self)

    def place(self) -> Place:
        """Return where this moment belongs."""
        node = backward_node()
        if node is None:
            is_own = threading.get_ident() == self._thread
            return Place(self._calls[-1] if self._calls and is_own else GLOBAL, "forward")
        if self._recomputed:
            return Place(self._recomputed[-1], "recomputation")
        return Place(self._module_of(node), "backward")

    def _module_of(self, node: Any) -> str:
        variable = getattr(node, "variable", None)
        if variable is not None:  # adds to the gradient of a leaf; such nodes have no number
            return self._owner_of_parameter.get(id(variable), GLOBAL)
        at = bisect_right(self._numbers, node_number(node)) - 1
        return self._modules_at[at] if at >= 0 else GLOBAL

    def enter(self, module: nn.Module) -> None:
        """Note that a module is being called."""
        calls = self._running()
        name = self._names.get(id(module))
        if name is None:
            name = self._add(module, calls[-1] if calls else "")
        calls.append(name)
        self._note_change()

    def leave(self, module: nn.Module) -> None:
        """Note the end of a call, which may have raised."""
        calls = self._running()
        name = self._names.get(id(module))
        if name in calls:
            while calls.pop() != name:
                pass
        self._note_change()

    def _running(self) -> list[str]:
        return self._calls if backward_node() is None else self._recomputed

    def _note_change(self) -> None:
        running = self._recomputed or self._calls
        self._numbers.append(next_node_number())
        self._modules_at.append(running[-1] if running else GLOBAL)

    def _add(self, module: nn.Module, parent: str) -> str:
        """Name a module that no known one has as a part, and all its parts."""
        kind = type(module).__name__
        base = f"{parent}.{kind}" if parent else kind
        root, count = base, 1
        while root in self.modules:
            count += 1
            root = f"{base}({count})"
        for path, part in module.named_modules():
            if id(part) in self._names:  # called before, and then as a whole
                continue
            name = f"{root}.{path}" if path else root
            self._names[id(part)] = name
            own = dict(part.named_parameters(recurse=False))
            for parameter in own.values():
                self._owner_of_parameter.setdefault(id(parameter), name)
            self.modules[name] = ModuleInfo(name=name, kind=type(part).__name__, parameters=own)
        self._kept.append(module)
        return root


def with_parents(name: str) -> Iterator[str]:
    """Yield a module, those that it is a part of, and what stands for all.

    >>> list(with_parents("MLP.net.0"))
    ['MLP.net.0', 'MLP.net', 'MLP', 'Global']
    """
    while name != GLOBAL:
        yield name
        name = name.rpartition(".")[0] or GLOBAL
    yield GLOBAL


_KEY = "dtckpt_thread"


def mark_thread() -> None:
    """Let the threads in which autograd works for this one, as on accelerators, know that."""
    hand_to_autograd(_KEY, threading.get_ident())
    ask_for_owner(_owner)


def _owner() -> int | None:
    return handed_to_autograd(_KEY)


_followed: dict[int, list[ModuleTracker]] = {}
_lock = threading.RLock()
_hooks: list[Any] = []


def _follow(tracker: ModuleTracker) -> None:
    # Hooks on all modules are the process's, which may have many ranks: one pair serves them all.
    thread = threading.get_ident()
    with _lock:
        _followed[thread] = [*_followed.get(thread, ()), tracker]
        if not _hooks:
            hooks = torch.nn.modules.module
            _hooks.append(hooks.register_module_forward_pre_hook(_enter))
            _hooks.append(hooks.register_module_forward_hook(_leave, always_call=True))


def _unfollow(tracker: ModuleTracker) -> None:
    with _lock:
        for thread, trackers in list(_followed.items()):
            left = [found for found in trackers if found is not tracker]
            if left:
                _followed[thread] = left
            else:
                del _followed[thread]
        if not _followed:
            for hook in _hooks:
                hook.remove()
            _hooks.clear()


def _enter(module: nn.Module, _args: Any) -> None:
    for tracker in _followed.get(working_thread(), ()):
        tracker.enter(module)


def _leave(module: nn.Module, _args: Any, _result: Any) -> None:
    for tracker in _followed.get(working_thread(), ()):
        tracker.leave(module)
