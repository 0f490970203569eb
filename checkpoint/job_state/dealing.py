"""Positions in the data, dealt out anew to another number of data loaders."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from dtckpt.errors import LayoutMismatch

from ..state.coordinates import Coordinate, Dealing, DealRule
from ..tensors.subclasses import is_subclass, plain_tensors


def deal_samples(*counts: str) -> DealRule:
    """Return a ``resize=`` for data loaders of which each takes every n-th sample of one order.

    ``counts`` name the numbers of samples in the state of a loader, with ``/`` between the keys.
    With n loaders loader i takes the samples i, i + n, ... of an order that does not depend on n,
    as torch's ``DistributedSampler`` deals them out; so once all have taken k, the first ``n * k``
    are taken. Of other numbers of loaders each is told to have taken its share of these. All else
    in the states has to be the same, such as the epoch, and the number of batches where the global
    batch keeps its size.

    LayoutMismatch, at the load and before anything is filled unless tensors are among the states,
    where loaders have not taken the same number, or the new ones cannot have.

    >>> from dtckpt.dtensor import Mesh
    >>> old, new = Mesh((4,), ("dp",)), Mesh((2,), ("dp",))
    >>> saved = {at: {"epoch": 1, "taken": 10} for at in old.coordinates()}
    >>> deal_samples("taken")(saved, Dealing(saved=old, wanted=new, coordinate=(1,)))
    {'epoch': 1, 'taken': 20}
    """

    def deal(values: Mapping[Coordinate, Any], dealing: Dealing) -> Any:
        first = next(iter(values))
        made = copy.deepcopy(values[first])
        rest = {at: copy.deepcopy(value) for at, value in values.items()}
        for path in counts:
            told = {at: _above(value, path).pop(_last(path)) for at, value in rest.items()}
            _above(made, path)[_last(path)] = _share(path, told, dealing)
        for at, value in rest.items():
            where = _difference(rest[first], value, "")
            if where is not None:
                raise LayoutMismatch(
                    f"data loaders {first} and {at} differ in {where or 'their states'}, which is "
                    f"none of the counts {list(counts)}: positions cannot be dealt out anew to "
                    f"{dealing.wanted}. Load on {dealing.saved}, or give a resize= of your own"
                )
        return made

    return deal


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _above(value: Any, path: str) -> dict[str, Any]:
    """Return the dict that a count is in."""
    inner = value
    for key in path.split("/")[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or _last(path) not in inner:
        raise LayoutMismatch(f"no count {path!r} was saved for a data loader; name those it has")
    return cast(dict[str, Any], inner)


def _share(path: str, told: Mapping[Coordinate, object], dealing: Dealing) -> int:
    """Return how many samples each of the new loaders has taken."""
    count = next(iter(told.values()))
    if (
        not isinstance(count, int)
        or count < 0
        or any(type(other) is not int or other != count for other in told.values())
    ):
        raise LayoutMismatch(
            "data loaders have not taken equal numbers of samples "
            f"({path}: {list(told.values())[:8]}), so what they took is not the beginning of one "
            "order. Load on as many loaders"
        )
    share, left = divmod(count * dealing.saved.size, dealing.wanted.size)
    if left:
        raise LayoutMismatch(
            f"{count * dealing.saved.size} samples were taken ({path}: {count} by each of "
            f"{dealing.saved.size}), which {dealing.wanted.size} data loaders cannot have taken "
            "in equal numbers. Save after a step at which they can"
        )
    return share


def _difference(one: Any, other: Any, where: str) -> str | None:
    """Return where two states differ; None where they do not."""
    if type(one) is not type(other):
        return where
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return where
        pairs = [(str(key), one[key], other[key]) for key in cast(dict[Any, Any], one)]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return where
        pairs = [(str(i), *two) for i, two in enumerate(zip(one, other, strict=True))]
    else:
        return None if _bits(one) == _bits(other) else where
    found = (_difference(a, b, f"{where}/{key}".strip("/")) for key, a, b in pairs)
    return next((at for at in found if at is not None), None)


def _bits(value: Any) -> Any:
    """Return what is equal for values that are the same, bit for bit: NaN equals no number."""
    if is_subclass(value):
        return type(value), [_bits(tensor) for tensor in plain_tensors(value)]
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return value.dtype, value.shape, flat.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic | float | complex):
        array = np.asarray(value)
        return array.dtype, array.shape, array.tobytes()
    return value
