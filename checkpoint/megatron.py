"""What a running Megatron holds: the tensors of its sharded state dicts, by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dtckpt.errors import LayoutMismatch, PlacementError

from ..dtensor.geometry.box import Box
from .state.names import Path, index_component, join, key_component
from .state.tree import SEQUENCES, dict_tag
from .tensors.announced import BoxedTensor
from .tensors.materialising import memory_key


def megatron_tensors(sharded_state_dict: Mapping[Any, Any]) -> dict[str, BoxedTensor]:
    """Return the tensors of a sharded state dict of Megatron by their keys, to save or load.

    ``model.sharded_state_dict()`` has a ``ShardedTensor`` of megatron.core for every parameter of
    this rank, those of stacked layers under one key. They are brought together, each with the boxes
    that this rank holds, so that ``load(megatron_tensors(...), "iter_0000010", strict="state")``
    fills the parameters themselves from what any other parallelism has saved. Nothing is copied or
    sent. Values and objects (``_extra_state``, generators) are left out. What is known of the class
    is that of megatron-core 0.16.1.

    Raises LayoutMismatch, naming the tensor, for one that is described otherwise at two places, has
    no data, or is a part of a flattened tensor; and for a factory, which
    ``megatron.core.dist_checkpointing.mapping.apply_factories`` turns into tensors first.
    """
    found: dict[str, BoxedTensor] = {}
    for name, value in _values(sharded_state_dict, ()):
        if hasattr(value, "build_fn"):
            raise LayoutMismatch(
                f"{name}: a {type(value).__name__}, of which tensors are still to be made; call "
                "apply_factories of megatron.core.dist_checkpointing.mapping first"
            )
        if all(hasattr(value, attribute) for attribute in ("key", "global_offset", "local_shape")):
            _add(found, name, value)
    return found


def _values(value: Any, path: Path) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and dict_tag(value) is not None:
        for key, item in value.items():
            component = key_component(key) if isinstance(key, str | int) else str(key)
            yield from _values(item, (*path, component))
    elif type(value) in SEQUENCES:
        for index, item in enumerate(value):
            yield from _values(item, (*path, index_component(index)))
    else:
        yield join(path), value


def _add(found: dict[str, BoxedTensor], name: str, value: Any) -> None:
    data, key, shape = value.data, value.key, tuple(value.global_shape)
    if not isinstance(data, torch.Tensor) or getattr(value, "flattened_range", None) is not None:
        raise LayoutMismatch(
            f"{name}: {key!r} has {'no data' if data is None else 'a part of a flattened tensor'}, "
            "and there is no telling which elements of it are whose"
        )
    sizes = (1,) * value.prepend_axis_num + tuple(value.local_shape)
    try:
        box = Box(tuple(value.global_offset), sizes)
    except PlacementError as error:
        raise LayoutMismatch(f"{name}: {key!r}: {error}") from error
    if tuple(data.shape) != tuple(value.local_shape) or not Box.whole(shape).contains(box):
        raise LayoutMismatch(
            f"{name}: {key!r} says {box} of {list(shape)}, and its data is {list(data.shape)}"
        )
    known = found.setdefault(key, BoxedTensor(torch.Size(shape), data.dtype))
    part = data.view(sizes)
    same = known.parts.get(box)
    if (known.shape, known.dtype) != (torch.Size(shape), data.dtype) or (
        same is not None and memory_key(same) != memory_key(part)
    ):
        raise LayoutMismatch(f"{name}: {key!r} is described otherwise at another place")
    known.parts[box] = part
