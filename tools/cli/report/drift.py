"""How the weights of a run move from one checkpoint to the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtckpt.errors import CheckpointError, ObjectNotFound, StorageError

from ..common.console import printable
from ..common.telling import bar

if TYPE_CHECKING:
    from ....checkpoint.examining.drift import Sum
    from ....checkpoint.examining.movement import Moved, Movement
    from ....checkpoint.runs.overview import StepOverview
    from ....storage import Store

_MAX_PARTS = 8
_MAX_MODULES = 130
"""As many layers as the deepest models have, and what is beside them."""
_MOST = 5
"""Tensors that are told of each step: that moved most, and that have become NaN or infinite."""
_GONE = "not in the newest"


def drifts(store: Store, steps: Sequence[StepOverview], max_steps: int) -> dict[str, Any]:
    """Return how far weights have moved from each whole checkpoint of a run to the next.

    Of more than ``max_steps`` checkpoints so many are compared, spread evenly, the first and the
    last included. Pairs of which one cannot be compared are told with the reason. What each pair
    has of parts and modules is in the order of those; ``odd`` are the modules with NaN since.
    """
    from ....checkpoint import read_manifest
    from ....checkpoint.examining.modules import modules_of
    from ....checkpoint.examining.movement import movement

    whole = [step for step in steps if step.state == "committed"]
    chosen = _spread(whole, max_steps)
    pairs: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "num_steps": len(whole),
        "num_compared": len(chosen),
        "pairs": pairs,
    }
    if len(chosen) < 2:
        return document | {"parts": [], "modules": []}
    newest = read_manifest(store.substore(chosen[-1].name)).tensors
    num_bytes = {name: tensor.num_bytes for name, tensor in newest.items()}
    cuts = [modules_of(num_bytes, most) for most in (_MAX_PARTS, _MAX_MODULES)]
    sums: list[tuple[dict[str, Moved], ...]] = []
    known: dict[str, Sum] = {}
    for before, after in itertools.pairwise(chosen):
        pair: dict[str, Any] = {"from": before.name, "to": after.name}
        pairs.append(pair)
        try:
            with bar(f"comparing {before.name} and {after.name}") as on_progress:
                found = movement(
                    store.substore(before.name),
                    store.substore(after.name),
                    known,
                    on_progress=on_progress,
                )
        except CheckpointError as error:
            if isinstance(error, StorageError) and not isinstance(error, ObjectNotFound):
                raise  # what is not found was removed meanwhile
            pair["problem"] = printable(str(error))
            sums.append(({}, {}))
            known = {}
        else:
            pair |= _told(found)
            sums.append((_summed(found, cuts[0]), _summed(found, cuts[1])))
            known = dict(found.squares)
    for which, key in enumerate(("parts", "modules")):
        met = {name for summed in sums for name in summed[which]}
        names = [name for name in dict.fromkeys(cuts[which].values()) if name in met]
        names += sorted(met.difference(names))
        document[key] = [printable(name) or "all" for name in names]
        for pair, summed in zip(pairs, sums, strict=True):
            moved = [summed[which].get(name) for name in names]
            pair[key] = [one.relative if one else None for one in moved]
            pair["odd"] = [at for at, one in enumerate(moved) if one and one.has_odd]
    return document


def _spread(steps: Sequence[StepOverview], most: int) -> list[StepOverview]:
    """Return some of many steps, spread evenly, the first and the last included."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _summed(found: Movement, modules: dict[str, str]) -> dict[str, Moved]:
    summed: dict[str, Moved] = {}
    for name, moved in found.moved.items():
        module = modules.get(name, _GONE)
        summed[module] = summed[module] + moved if module in summed else moved
    return summed


def _told(found: Movement) -> dict[str, Any]:
    """Return the tensors that moved most, and those that hold NaN or infinities since.

    A single number, such as a count of steps, and what was all zero have no drift that tells much.
    """
    moved = sorted(found.drifts.items(), key=lambda item: item[1].relative_l2, reverse=True)
    most = [
        (name, drift)
        for name, drift in moved
        if drift.num_values > 1 and 0 < drift.relative_l2 < math.inf
    ]
    bad = [(name, drift) for name, drift in moved if sum((drift.num_nan[1], drift.num_inf[1]))]
    return {
        "most": [
            [printable(name), drift.relative_l2, drift.max_abs] for name, drift in most[:_MOST]
        ],
        "bad": [
            [printable(name), drift.num_nan[1], drift.num_inf[1]] for name, drift in bad[:_MOST]
        ],
        "num_bad": len(bad),
        "num_changed": sum(bool(drift.num_changed) for drift in found.drifts.values()),
        "num_weights": len(found.moved),
        "num_apart": found.num_apart,
    }
