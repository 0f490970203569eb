"""State of a sharded parameter that each rank has otherwise, such as that of experts.

An expert without tokens gets no gradient, so its optimizer state is absent on some ranks, or counts
fewer steps there. Such an entry of an optimizer's state is stored apart for each part of its
parameter: ``{"per_rank": {rank: {"part": ..., "state": ...}}}`` by the first rank that holds the
part, with the local tensors of what is sharded. It goes back to whoever holds the same part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dtckpt.errors import CheckpointError

from ...dtensor.geometry.box import Box
from ..files.stored_tensor import StoredTensor
from ..ranks.together import Answers, Ranks, together
from ..state.tree import TreeIndex, below, children, tag_of, unflatten
from ..state.values import Node
from ..tensors.dtensors import is_dtensor, layout_of
from ..tensors.local_tensor import LocalTensor, local_tensor, tensor_tag
from ..tensors.materialising import Replaced, is_meta, stand_in
from ..tensors.new_subclasses import NewSubclass, new_subclass
from ..tensors.subclasses import class_text, has_subclass_shard, is_subclass, take_apart
from .state_form import empty_as_saved, empty_on_mesh, local_device, wrapped_as

PART, STATE = "part", "state"
"""Keys of what a rank stores of such an entry."""


@dataclass(frozen=True, slots=True)
class OwnEntry:
    """Stands in the state for an entry that is stored apart for each part of its parameter."""

    param: Any
    entry: Mapping[Any, Any]
    """Empty where this rank has none."""

    def owner(self, rank: int) -> int:
        """Return the first of the ranks that hold the part of this one.

        What ranks without elements have is their own: an empty box says nothing of where they are.
        """
        layout, parts = local_of(self.param).layout, local_of(self.param).parts
        if layout is None or not parts or parts[0][0].is_empty:
            return rank
        return layout.replica_ranks(parts[0][0])[0]

    def to_state(self) -> dict[str, Any]:
        """Return what a rank stores: which part it is, and the local tensors."""
        local = local_of(self.param)
        sharded = [key for key, value in self.entry.items() if is_dtensor(value)]
        part = {"shape": list(local.shape), "boxes": boxes_of(local), "sharded": sharded}
        return {PART: part, STATE: {key: _local_value(v) for key, v in self.entry.items()}}


def local_of(param: Any) -> LocalTensor:
    """Return how this rank holds a parameter, be it on the meta device."""
    return local_tensor("", stand_in(param, Replaced()) if is_meta(param) else param)


def boxes_of(local: LocalTensor) -> list[str]:
    """Return the part of a tensor that this rank holds."""
    return [str(box) for box, _ in local.parts]


def _local_value(value: Any) -> Any:
    if has_subclass_shard(value):
        return value._local_tensor
    parts = local_tensor("", value).parts if is_dtensor(value) else ()
    return parts[0][1] if len(parts) == 1 else value


def entries_that_differ(
    ranks: Ranks, entries: Mapping[str, tuple[Any, Mapping[Any, Any] | None]]
) -> set[str]:
    """Return the names of the entries that ranks with other parts have otherwise. Collective.

    ``entries`` are, by name, sharded parameters with their state, or None where there is none.
    Those that differ between ranks with the same part are left out: nothing tells which is right.
    """

    def tell() -> bytes:
        told: dict[str, tuple[list[str], str]] = {}
        for name, (param, entry) in entries.items():
            local = local_of(param)
            if local.layout is not None and len(local.parts) == 1:
                told[name] = boxes_of(local), _digest(entry)
        return json.dumps(told).encode()

    def decide(answers: Answers) -> bytes:
        by_name: dict[str, dict[str, set[str]]] = {}
        for answer in answers.values():
            for name, (boxes, digest) in json.loads(answer).items():
                by_name.setdefault(name, {}).setdefault(json.dumps(boxes), set()).add(digest)
        differing = [
            name
            for name, parts in by_name.items()
            if all(len(digests) == 1 for digests in parts.values())
            and len(set[str]().union(*parts.values())) > 1
        ]
        return json.dumps(differing).encode()

    return set(json.loads(together(ranks, "save: compare state of optimizers", tell, decide)))


def _digest(entry: Mapping[Any, Any] | None) -> str:
    """Return what has to be the same on all ranks if an entry is to be stored as one."""
    if not entry:
        return ""
    told: list[tuple[str, str]] = []
    for key, value in entry.items():
        text = "sharded"
        if tensor_tag(value) is None:
            text = repr(value)
        elif has_subclass_shard(value):
            text = f"sharded {class_text(type(value._local_tensor))}"
        elif not is_dtensor(value):
            text = _digest_of_plain(value)
        told.append((repr(key), text))
    return json.dumps(told)


def _digest_of_plain(value: Any) -> str:
    if is_subclass(value):
        parts = take_apart("", value, allow_pickle=True)
        inner = {key: _digest_of_plain(tensor) for key, tensor in parts.tensors.items()}
        return json.dumps([parts.note.to_text(), inner])
    local = local_tensor("", value)
    digests = [digest for _, digest in local.digests()]
    return f"{local.dtype.torch_name}{list(local.shape)}{digests}"


def is_own_entry(index: TreeIndex, at: str) -> bool:
    """Whether the state of a parameter was stored apart for each part of it."""
    node = index.nodes.get(at)
    return isinstance(node, dict) and tag_of(node) == "per_rank"  # pyright: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """What was stored of an entry for one part of its parameter."""

    at: str
    """Name of its state in the checkpoint."""
    shape: tuple[int, ...]
    boxes: tuple[str, ...]
    sharded: frozenset[str]
    """Keys of what was sharded as the parameter."""
    is_absent: bool

    def overlaps(self, boxes: list[str]) -> bool:
        """Whether it has elements of these boxes."""
        mine, others = map(Box.parse, self.boxes), list(map(Box.parse, boxes))
        return any(box.intersect(other) is not None for box in mine for other in others)


def saved_parts(index: TreeIndex, at: str) -> list[SavedPart]:
    """Return what was stored of an entry; CheckpointError where it is malformed."""
    found: list[SavedPart] = []
    for _, component, node in children(index.nodes[at]):
        inner = {key: child for key, _, child in children(node)}
        if set(inner) != {PART, STATE}:
            raise CheckpointError(f"{at}: no state of a part of a parameter stands here")
        part = unflatten(inner[PART], lambda name, _: name, allow_pickle=False)
        found.append(
            SavedPart(
                at=below(below(at, component), STATE),
                shape=tuple(part["shape"]),
                boxes=tuple(part["boxes"]),
                sharded=frozenset(part["sharded"]),
                is_absent=not children(inner[STATE]),
            )
        )
    return found


def new_subclass_part(
    param: Any,
    node: Node,
    name: str,
    stored: Mapping[str, StoredTensor],
    *,
    is_sharded: bool,
    allow_pickle: bool,
) -> NewSubclass:
    """Return a tensor of the state of a parameter that consists of others, which are filled.

    Raises CheckpointError where its class cannot make it.
    """
    wrap = partial(wrapped_as, param) if is_sharded and is_dtensor(param) else None
    device = local_device(param)

    def empty(inner: str) -> torch.Tensor:
        return empty_as_saved(stored[inner], device)

    return new_subclass(node, name, empty, allow_pickle=allow_pickle, wrap=wrap)


def new_part(param: Any, stored: StoredTensor, *, is_sharded: bool) -> tuple[Any, torch.Tensor]:
    """Return a tensor of the state of a parameter, and its local one, which is filled."""
    layout = layout_of("", param) if is_dtensor(param) else None
    if is_sharded and layout is not None:
        dtype = getattr(torch, stored.dtype.torch_name)
        made = empty_on_mesh(param, layout, dtype, stored.order)
        return made, local_tensor("", made).parts[0][1]
    # Counts of steps stay on the host; load_state_dict moves them where the optimizer wants them.
    device = param.device_mesh.device_type if stored.shape and is_dtensor(param) else "cpu"
    made = empty_as_saved(stored, device)
    return made, made
