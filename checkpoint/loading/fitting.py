"""Whether destinations can take what was saved: kinds, shapes, dtypes, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..files.stored_tensor import StoredTensor
from ..tensors.local import LocalTensor, is_shared
from ..tensors.materialising import is_meta
from ..tensors.overlaps import overlaps_itself
from .casting import DTypePolicy, is_lossless, may_convert


def unfit(
    stored: StoredTensor | None, local: LocalTensor, destination: Any, policy: DTypePolicy
) -> str:
    """Return what is wrong between a stored tensor and where it is to be loaded, or ""."""
    if stored is None:
        return f"{local.name}: the tree names this tensor, the manifest has it not"
    if stored.shape != local.shape or not (
        stored.dtype == local.dtype or may_convert(policy, stored.dtype, local.dtype)
    ):
        hint = _dtype_hint(stored, local, policy) if stored.shape == local.shape else ""
        return (
            f"{local.name}: saved as {stored.dtype.torch_name}{list(stored.shape)}, wanted as "
            f"{local.dtype.torch_name}{list(local.shape)}{hint}"
        )
    if isinstance(destination, np.ndarray) and not is_shared(destination):
        return f"{local.name}: the numpy array is read-only or runs backwards; give a fresh one"
    for box, tensor in local.parts:
        if not tensor.is_contiguous() and not is_meta(destination) and overlaps_itself(tensor):
            return f"{local.name}: the destination of {box} overlaps itself in memory; clone it"
    return ""


def casts(
    stored: Mapping[str, StoredTensor], tensors: Mapping[str, LocalTensor]
) -> dict[str, tuple[str, str]]:
    """Return saved and wanted dtype, by their torch names, of tensors for which they differ."""
    return {
        name: (stored[name].dtype.torch_name, local.dtype.torch_name)
        for name, local in tensors.items()
        if stored[name].dtype is not local.dtype
    }


def _dtype_hint(stored: StoredTensor, local: LocalTensor, policy: DTypePolicy) -> str:
    saved, wanted = stored.dtype, local.dtype
    if policy == "error" and is_lossless(saved.torch_name, wanted.torch_name):
        return '; pass dtype_policy="widen" to convert it without loss'
    if policy != "cast" and may_convert("cast", saved, wanted):
        return '; pass dtype_policy="cast" to convert it with loss'
    return "; there is no such conversion" if policy == "cast" else ""
