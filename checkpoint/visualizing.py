"""Pictures of what the ranks that saved a checkpoint held."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..dtensor.debug.pictures.sharding import Form, visualize_sharding
from ..storage.base import Store
from .formats.opening import open_place, read_manifest
from .state.selecting import selection_of


def visualize(
    checkpoint_id: str | os.PathLike[str] | Store,
    select: str | Sequence[str] | None = None,
    *,
    form: Form = "text",
    show: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Draw which rank held which part of the tensors of a checkpoint; return and print it.

    Reads the manifest only. Tensors with the same shape and layout share a picture. ``select`` is
    as in ``load``; ``form`` and ``show`` as in ``dtckpt.dtensor.debug.visualize_sharding``. Raises
    LayoutMismatch where ``select`` selects nothing.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    tensors = read_manifest(store).tensors
    selection = selection_of(select)
    if selection is not None:
        selection.check(list(tensors), store.url)
    layouts = {n: t.layout for n, t in tensors.items() if selection is None or n in selection}
    return visualize_sharding(layouts, store.url, form=form, show=show)
