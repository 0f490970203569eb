"""Traced mappings: somebody's own loader is run once, and what it does is a table."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import LayoutMismatch

from ...storage.base import Store
from ..copies.copies import joined
from ..files.manifest import Manifest
from ..formats.opening import open_place, read_manifest
from ..tensors.dtensors import is_dtensor
from ..tensors.dtypes import BY_TORCH_NAME, DType
from .copies_rule import Copies, Made
from .recording import Recorder
from .table import MappingTable, tensor_leaves

Loader = Callable[[dict[str, Tensor]], object]
"""Takes the tensors of a checkpoint by name; fills a module, or returns what it makes of them."""


def trace_mapping(
    loader: Loader,
    source: str | os.PathLike[str] | Store | Manifest,
    target: torch.nn.Module | Mapping[str, Tensor] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> MappingTable:
    """Run a loader on tensors that have no elements, and return the table of what it does.

    ``loader`` is called once with all tensors of the checkpoint ``source`` by their names: they
    have shapes and dtypes, and record slices, views, permutations, ``cat``, ``stack``, ``copy_``
    and what else only moves elements. What it fills is ``target``, a module or tensors by name,
    be it on the meta device: by ``copy_`` into parameters or parts of them, by
    ``load_state_dict``, or by other parameters in their places. Nothing is written to it. Without a
    target the loader returns tensors by name. Targets that it does not come to are left out.

    The table is about the names of the target, and takes all tensors of the checkpoint, so that
    none is left over. It is exact for this checkpoint and others with the same names and shapes. A
    loader that takes the part of one rank gives the table of that rank, by which this rank loads
    alone (``no_dist=True``).

    Raises LayoutMismatch with file and line of the loader where it computes with elements, converts
    them or asks for their values, and with the name of a target of which it fills a part only; and
    what ``open`` raises.
    """
    manifest = source if isinstance(source, Manifest) else _manifest(source, storage_options or {})
    recorder = Recorder()
    stored = {leaf: manifest.tensors[name] for leaf, name in tensor_leaves(manifest, "").items()}
    given: dict[str, Tensor] = {
        leaf: recorder.source(leaf, getattr(torch, tensor.dtype.torch_name), tensor.shape)
        for leaf, tensor in stored.items()
    }
    for name, tensor in _targets(target).items():
        if is_dtensor(tensor):
            raise LayoutMismatch(
                f"target {name!r} is a DTensor: trace into the whole module, for instance on the "
                "meta device, and load the one that is spread over ranks by the table"
            )
        recorder.add_target(tensor)
    with warnings.catch_warnings(), torch.no_grad(), recorder.watching():
        # Parameters without memory: what is copied to them goes nowhere, and is recorded.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        returned = loader(given)
    filled = _named(returned if target is None else target)
    if target is None:
        _check_returned(returned, recorder)
    made: dict[str, Made] = {}
    seen: set[int] = set()
    for name, tensor in filled.items():
        try:
            copies = joined(recorder.copies_of(tensor))
        except LayoutMismatch as error:
            raise LayoutMismatch(f"tensor {name!r}: {error}") from error
        is_filled = bool(copies) or tensor.numel() == 0
        if is_filled and id(tensor) not in seen:
            dtype = None if any(copy.source for copy in copies) else _dtype_of(tensor)
            made[name] = Made(tuple(tensor.shape), copies, dtype)
            if isinstance(target, torch.nn.Module):  # what is tied to it is filled with it
                seen.add(id(tensor))
    if not any(told.copies for told in made.values()):
        raise LayoutMismatch("the loader has filled nothing; does it return what it makes?")
    return MappingTable([Copies({leaf: tensor.shape for leaf, tensor in stored.items()}, made)])


def _manifest(source: str | os.PathLike[str] | Store, options: Mapping[str, Any]) -> Manifest:
    store = open_place(source, **options)
    try:
        return read_manifest(store)
    finally:
        if store is not source:
            store.close()


def _dtype_of(tensor: Tensor) -> DType | None:
    return BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))


def _targets(target: torch.nn.Module | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the tensors that a loader may fill; LayoutMismatch where there are none."""
    named = _named(target)
    if target is not None and not named:
        raise LayoutMismatch(
            "target= has no tensors; give a module, or a dict of tensors by name, not of others"
        )
    return named


def _check_returned(returned: Any, recorder: Recorder) -> None:
    """Raise LayoutMismatch where something is not a tensor by its name that was made here."""
    for name, value in returned.items():
        if isinstance(value, Mapping | list | tuple):
            raise LayoutMismatch(
                f"the loader returns {type(value).__name__} as {name!r}; expected tensors by name"
            )
        if isinstance(value, Tensor) and value.numel() and not recorder.is_filled(value):
            raise LayoutMismatch(
                f"the loader returns {name!r}, in which is nothing of the checkpoint; leave it out"
            )


def _named(target: object) -> dict[str, Tensor]:
    """Return tensors by name; LayoutMismatch where there are none."""
    if target is None:
        return {}
    state = target.state_dict(keep_vars=True) if isinstance(target, torch.nn.Module) else target
    if not isinstance(state, Mapping):
        raise LayoutMismatch(
            f"expected a module or tensors by name, got {type(state).__name__}; "
            "give target=, or let the loader return what it makes"
        )
    return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
