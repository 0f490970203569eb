"""What the page of a run shows, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from dtckpt.errors import CheckpointError

from ..common.console import count, iec

if TYPE_CHECKING:
    from ....checkpoint import Step
    from ....storage import Store

_NUM_REQUESTS = 16


def run_document(store: Store, steps: Sequence[Step]) -> dict[str, Any]:
    """Return what the manifests of a run tell; drift and stalls are added to it.

    A checkpoint that cannot be read is listed with the reason.
    """
    with ThreadPoolExecutor(min(_NUM_REQUESTS, len(steps)), "dtckpt-report") as pool:
        found = list(pool.map(partial(_step, store), steps))
    own = sum(step["own_bytes"] for step in found)
    return {
        "kind": "run",
        "url": store.url,
        "facts": [
            ("Checkpoints", f"{count(len(steps), 'committed checkpoint')}, {iec(own)}"),
            ("Newest", f"{steps[-1].name}, {found[-1]['created'] or 'unreadable'}"),
        ],
        "steps": found,
    }


def _step(store: Store, step: Step) -> dict[str, Any]:
    from ....checkpoint import read_manifest

    told: dict[str, Any] = {
        "number": step.number,
        "name": step.name,
        "created": None,
        "num_tensors": None,
        "own_bytes": 0,
        "borrowed_bytes": 0,
        "bases": [],
        "marks": [],
        "problem": None,
    }
    try:
        manifest = read_manifest(store.substore(step.name))
    except CheckpointError as error:
        return told | {"problem": str(error)}
    return told | {
        "created": manifest.created,
        "num_tensors": len(manifest.tensors),
        "own_bytes": sum(record.size for record in manifest.files),
        "borrowed_bytes": sum(file.record.size for file in manifest.borrowed),
        "bases": list(dict.fromkeys(file.source for file in manifest.borrowed)),
    }
