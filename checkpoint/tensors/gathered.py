"""Parameters that FSDP2 has gathered: a load must not fill them, nor a save take them for state.

Within the forward pass, after it with ``reshard_after_forward=False`` (and of the root by default),
and after ``unshard()`` the parameters of a module are whole copies, which the next reshard drops.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dtckpt.errors import LayoutMismatch

from ...dtensor.torch_private import gathered_by_torch_fsdp, storage_id
from ..ranks.text import some_names
from .local_tensor import LocalTensor

_REMEDY = (
    "Give the module itself, or its state_dict(), which has the sharded parameters; or call "
    "reshard() of each FSDP module in it first, and then named_parameters()"
)


def refuse_to_fill_gathered(tensors: Mapping[str, LocalTensor], where: str) -> None:
    """Raise LayoutMismatch, with their names, for parameters of FSDP that are not sharded now.

    Also for sharded ones of which the module still has a gathered copy: the next forward pass may
    compute with that, and so with the values of before the load.
    """
    gathered, stale = _gathered_storages()
    names = _names_in(tensors, gathered) or _freed(tensors)
    if names:
        raise LayoutMismatch(
            f"{where}: {some_names(names)}: parameters of an FSDP module that are not sharded now. "
            "These tensors are gathered copies, which the next reshard drops with all that is "
            f"loaded into them; nothing was loaded. {_REMEDY}"
        )
    names = _names_in(tensors, stale)
    if names:
        raise LayoutMismatch(
            f"{where}: {some_names(names)}: sharded parameters of an FSDP module that still has "
            "gathered copies of them. The next forward pass would compute with these copies, which "
            "have the values of before the load; nothing was loaded. Call reshard() of each FSDP "
            "module first, or give the module itself"
        )


def refuse_to_save_gathered(tensors: Mapping[str, LocalTensor]) -> None:
    """Raise LayoutMismatch, with their names, for parameters of FSDP that are not sharded now.

    They are whole copies in the dtype of computation, and older than the parameters if an optimizer
    has made a step since.
    """
    names = _names_in(tensors, _gathered_storages()[0]) or _freed(tensors)
    if names:
        raise LayoutMismatch(
            f"{some_names(names)}: parameters of an FSDP module that are not sharded now. These "
            "tensors are gathered copies: whole ones, perhaps of another dtype, and older than the "
            f"parameters after a step of the optimizer. {_REMEDY}"
        )


def _gathered_storages() -> tuple[set[int], set[int]]:
    """Return the storages of gathered copies, and of sharded parameters that have such a copy."""
    gathered: set[int] = set()
    sharded: set[int] = set()
    for parameter, copies in gathered_by_torch_fsdp():
        sharded.add(storage_id(_local(parameter)))
        gathered.update(storage_id(_local(copy)) for copy in copies)
    # Our own FSDP gathers anew what was written, so sharded parameters may be filled at any time.
    gathered.update(storage_id(_local(tensor)) for tensor in _gathered_by_ours())
    # On one rank a copy may be the memory of the parameter, in which nothing is lost.
    return gathered - sharded, sharded


def _freed(tensors: Mapping[str, LocalTensor]) -> list[str]:
    """Return the names of tensors whose memory was freed, as a reshard does with gathered copies.

    Asking a module in the same state for its state dict is such a reshard.
    """
    return [
        name
        for name, local in tensors.items()
        for _, part in local.parts
        if part.numel() and part.untyped_storage().nbytes() == 0
    ]


def _gathered_by_ours() -> Iterator[Any]:
    ours: Any = sys.modules.get("dtckpt.dtensor.fsdp.state")
    return iter(()) if ours is None else ours.gathered_tensors()


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _names_in(tensors: Mapping[str, LocalTensor], storages: set[int]) -> list[str]:
    """Return the names of the tensors whose elements lie in some storages."""
    if not storages:
        return []
    return [
        name
        for name, local in tensors.items()
        if any(storage_id(part) in storages for _, part in local.parts)
    ]
