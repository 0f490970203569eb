"""Calls that stand in the graphs of compilers: one operator, which they see and do not look into.

While a graph is recorded, tensors have no values: nothing may be sent for them, and no random
numbers be drawn. The operator stands in the graph instead, with the name of what is to be called,
and calls it whenever the graph runs. Its results are tensors of their own; it writes no input.

Compilers put operators in any order that inputs allow, by sizes, which differ between ranks, whose
collectives would then meet wrong ones. Every call therefore takes a tensor without elements that
the one before it returned.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..torch_private import (
    NotRecorded,
    never_recomputed,
    recording,
    register_effect,
    storage_id,
    will_recompute,
)

Run = Callable[[list[Tensor]], list[Tensor]]

_OPERATOR = "dtckpt::call"

torch.library.define(
    _OPERATOR,
    "(Tensor[] tensors, Tensor? after, str name) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_PROCESS = uuid.uuid4().hex[:12]
"""In all names: a graph that is kept on disk and read by another process does not find there what
bears the same number."""

_LOCK = threading.Lock()
_NAMES: dict[Hashable, str] = {}
_CALLED: dict[str, tuple[Run, Run]] = {}
"""What is called by a name, and what makes tensors as it would. They stay: nothing says when a
graph is gone."""

_LAST: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
"""What the last call of each recording returned for the next one."""


def record(
    key: Hashable, told: str, tensors: Sequence[Tensor], run: Run, make_alike: Run
) -> list[Tensor]:
    """Return what a graph that is recorded will find where it calls ``run`` on traced tensors.

    ``make_alike`` returns tensors of the same shapes, dtypes and devices as ``run``. Calls of one
    ``key`` do the same, those that come first are kept for all; ``told`` is for readers of graphs.

    Raises NotRecorded where the graph would call it once more in its backward pass: other random
    numbers, and an order of calls that nothing fixes.
    """
    if will_recompute():
        raise NotRecorded(
            f"{told}: not in a graph of which parts are computed again (activation checkpointing, "
            "or a memory budget below 1). Compile what is checkpointed, checkpoint(compiled), and "
            "not what calls checkpoint"
        )
    with _LOCK:
        name = _NAMES.get(key)
        if name is None:
            name = _NAMES[key] = f"{told} #{_PROCESS}.{len(_NAMES)}"
            _CALLED[name] = run, make_alike
    graph = recording()
    after = None if graph is None else _LAST.get(graph)
    with never_recomputed():
        *made, last = torch.ops.dtckpt.call.default(list(tensors), after, name)
    if graph is not None:
        _LAST[graph] = last
    return made


def _call(tensors: list[Tensor], after: Tensor | None, name: str) -> list[Tensor]:
    del after
    run, _ = _CALLED[name]
    given = {storage_id(tensor) for tensor in tensors}
    made = [
        one.clone() if storage_id(one) in given else one.contiguous()
        for one in run([tensor.detach() for tensor in tensors])
    ]
    return [*made, torch.empty(0)]


def _make_alike(tensors: list[Tensor], after: Tensor | None, name: str) -> list[Tensor]:
    del after
    _, make_alike = _CALLED[name]
    return [*make_alike(tensors), torch.empty(0)]


torch.library.impl(_OPERATOR, "CompositeExplicitAutograd")(_call)
torch.library.register_fake(_OPERATOR)(_make_alike)
register_effect(torch.ops.dtckpt.call.default)
