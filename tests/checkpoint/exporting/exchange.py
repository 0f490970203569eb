"""Exports for torch.distributed.checkpoint that one torch makes and another one loads.

    python -m tests.checkpoint.exporting.exchange write FOLDER
    python -m tests.checkpoint.exporting.exchange read FOLDER

Both may have other releases of torch, and need not have the package: `read` loads by torch alone.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from ..formats.makers.make_torch import plain, tensors


def state() -> dict[str, Any]:
    """Return the state that is exported."""
    return {"model": tensors(), **plain()}


def write(folder: str) -> None:
    """Save the state by dtckpt and export it to a folder."""
    import dtckpt.checkpoint as ckpt

    ckpt.save(state(), f"{folder}/saved", no_dist=True)
    ckpt.export(f"{folder}/saved", f"{folder}/exported", format="dcp")


def read(folder: str) -> None:
    """Load an export by torch; AssertionError where something is not as it was."""
    into = cleared(state())
    dcp.load(into, checkpoint_id=f"{folder}/exported")
    check(into, state(), "")


def cleared(value: Any) -> Any:
    """Return a state of the same structure without its values."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: cleared(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, Tensor | dict) for item in value):
        return [cleared(item) for item in value]
    return None


def check(found: Any, wanted: Any, path: str) -> None:
    """Raise AssertionError, with the place, where two states differ."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (path, found.keys())
        for key, item in wanted.items():
            check(found[key], item, f"{path}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), (path, found)
        for number, (one, item) in enumerate(zip(found, wanted, strict=True)):
            check(one, item, f"{path}/{number}")
    elif isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype, (path, found.dtype)
        assert torch.equal(found, wanted), (path, found)
    else:
        assert type(found) is type(wanted), (path, found)
        assert found == wanted, (path, found)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
    print(sys.argv[1], "with torch", torch.__version__)
