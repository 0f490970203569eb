"""Conversion between checkpoints and files of ``torch.save``, under the name of torch's module.

``BroadcastingTorchSaveReader`` and ``DynamicMetaLoadPlanner``, which let ``load`` read a file of
``torch.save``, are torch's; ``load`` of dtckpt needs neither.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)

from ..formats.opening import open_place, read_manifest, stored_data
from ..saving import saver
from .item_values import stored_value

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Write a checkpoint of dtckpt or DCP as one file of ``torch.save``, with whole tensors.

    For one process, which holds all of it in memory. Errors are those of ``open``.
    """
    torch.save(_whole_state(dcp_checkpoint_dir), torch_save_path)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Save what a file of ``torch.save`` holds as a checkpoint of dtckpt, which ``load`` reads.

    For one process, which holds all of it in memory. A checkpoint that is there is replaced. No
    pickle is run, so objects of other classes than ``torch.load(weights_only=True)`` takes are
    refused.
    """
    saver.save(_whole_state(torch_save_path), dcp_checkpoint_dir, no_dist=True, overwrite=True)


def _whole_state(place: str | os.PathLike[str]) -> Any:
    """Return the saved structure with all values and whole tensors."""
    store = open_place(place)
    try:
        manifest = read_manifest(store)
        return stored_value(manifest.tree, manifest, stored_data(store, manifest))
    finally:
        store.close()
