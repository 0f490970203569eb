"""Loading: match, prove that every byte is there, then read straight into the destinations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtckpt.errors import LayoutMismatch

from ..dtensor.irregular import IrregularLayout
from ..storage.base import Store
from ..storage.open import open_store
from .manifest import MANIFEST, Manifest, read_manifest_bytes
from .matching import Match, Rebuild, match
from .memory import find_sharing, overlaps_itself
from .ranks import Ranks, ranks_of, together
from .reading import Read, Want, execute, plan_reads
from .stored import StoredData
from .tensors import LocalTensor, is_shared, local_tensor, tensor_tag
from .transfer import TensorComparison, TensorSink


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, as one rank saw it. Names are those of leaves in the checkpoint."""

    url: str
    loaded: tuple[str, ...]
    """Tensors and values of this rank's state that were filled."""
    missing: tuple[str, ...]
    """Leaves of this rank's state that the checkpoint does not have; left as they were."""
    unexpected: tuple[str, ...]
    """Leaves of the checkpoint that no rank asked for."""
    dropped: tuple[str, ...]
    """Values that some rank kept for itself (PerRank) which takes no part in this load."""
    resharded: tuple[str, ...]
    """Loaded tensors of which this rank holds another part than at the save."""
    bytes_needed: int
    """Bytes of this rank's destinations."""
    bytes_read: int
    """Bytes of data that this rank read to fill them."""


def load(
    state_dict: Mapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    process_group: Any = None,
    no_dist: bool = False,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> LoadReport:
    """Fill ``state_dict`` from a checkpoint, whatever layout it was saved with.

    Tensors are filled in place: DTensors of any mesh and placement, plain tensors (each rank gets
    the whole), numpy arrays. Other leaves are replaced in their containers by the saved value.
    Objects with ``load_state_dict()`` are given their filled state dict at the end; a torch
    optimizer that has made no step yet is loaded without one.

    Every rank of ``process_group`` calls this; without a group this process alone does. ``strict``
    requires that the checkpoint has every leaf of the state and that some rank asks for every leaf
    of the checkpoint; otherwise the report lists what was left out.

    Raises the same error on every rank: NotCommitted, Corrupt, LayoutMismatch, StorageError. All
    that manifest, headers and sizes can tell is checked before any destination changes. A damaged
    block is found as it is read; the Corrupt error then lists what was already overwritten.
    """
    ranks = ranks_of(process_group, no_dist=no_dist)
    job = _Load(ranks, strict=strict, allow_pickle=allow_pickle)
    return job.run(state_dict, checkpoint_id, dict(storage_options or {}))


class _Load:
    """One load on one rank; holds what the phases hand on."""

    store: Store
    manifest: Manifest
    found: Match
    rebuild: Rebuild
    tensors: dict[str, LocalTensor]
    reads: list[Read]
    comparisons: list[Read]
    """Reads for tied tensors: what is stored for each must be equal."""

    def __init__(self, ranks: Ranks, *, strict: bool, allow_pickle: bool) -> None:
        self.ranks = ranks
        self.strict = strict
        self.touched: dict[str, None] = {}
        self.allow_pickle = allow_pickle

    def run(
        self,
        state: Mapping[Any, Any],
        target: str | os.PathLike[str] | Store,
        options: dict[str, Any],
    ) -> LoadReport:
        manifests = together(
            self.ranks, "load: read manifest", lambda: self.read_manifest(target, options)
        )
        answers = together(self.ranks, "load: plan", lambda: self.plan(state, manifests[0]))
        unexpected = _in_all([json.loads(answer) for answer in answers])
        together(self.ranks, "load: check", lambda: self.check_complete(unexpected))
        bytes_read = 0

        def read() -> bytes:
            nonlocal bytes_read
            bytes_read = execute(self.store, self.reads, touched=self.touched)
            bytes_read += execute(self.store, self.comparisons)
            return b""

        together(self.ranks, "load: read", read, touched=lambda: self.touched)
        together(self.ranks, "load: restore", self.restore)
        return self.report(unexpected, bytes_read)

    def read_manifest(
        self, target: str | os.PathLike[str] | Store, options: dict[str, Any]
    ) -> bytes:
        self.store = open_store(target, **options)
        if self.ranks.rank != self.ranks.all[0]:
            return b""
        return read_manifest_bytes(self.store)

    def plan(self, state: Mapping[Any, Any], manifest: bytes) -> bytes:
        """Match the state, plan all reads, and return the names that it does not ask for."""
        self.manifest = Manifest.from_bytes(manifest, f"{self.store.url}/{MANIFEST}")
        self.found, self.rebuild = match(
            state,
            self.manifest.tree,
            self.manifest.tensors,
            ranks=self.ranks,
            tensor_tag=tensor_tag,
            allow_pickle=self.allow_pickle,
        )
        self.tensors = {
            name: local_tensor(name, value) for name, value in self.found.destinations.items()
        }
        self.check_fit()
        self.plan_reads()
        return json.dumps(self.found.unexpected).encode()

    def check_fit(self) -> None:
        """Raise LayoutMismatch unless shapes, dtypes and kinds of all leaves agree."""
        problems = list(self.found.problems)
        for name, local in self.tensors.items():
            stored = self.manifest.tensors.get(name)
            if stored is None:
                problems.append(f"{name}: the tree names this tensor, the manifest has it not")
            elif (stored.dtype, stored.shape) != (local.dtype, local.shape):
                problems.append(
                    f"{name}: saved as {stored.dtype.torch_name}{list(stored.shape)}, wanted as "
                    f"{local.dtype.torch_name}{list(local.shape)}"
                )
            else:
                problems += _unfit_destinations(self.found.destinations[name], local)
        if problems:
            raise LayoutMismatch(
                f"{self.store.url}: {len(problems)} leaves do not fit and nothing was loaded:\n  "
                + "\n  ".join(problems[:20])
            )

    def plan_reads(self) -> None:
        """Plan what to read into every destination, and what to compare with tied ones."""
        parts = [(name, box, t) for name, local in self.tensors.items() for box, t in local.parts]
        sharing = find_sharing([tensor for _, _, tensor in parts])
        if sharing.overlapping:
            told = [f"{parts[a][0]} and {parts[b][0]}" for a, b in sharing.overlapping[:10]]
            raise LayoutMismatch(
                f"{self.store.url}: these destinations overlap in memory and nothing was loaded: "
                f"{'; '.join(told)}. Load into separate tensors"
            )
        wants: list[Want] = []
        compared: list[Want] = []
        for i, (name, box, tensor) in enumerate(parts):
            stored = self.manifest.tensors[name]
            if i in sharing.tied:
                sink = TensorComparison(name, tensor)
                compared.append(Want(tensor=stored, box=box, sink=sink))
            else:
                wants.append(Want(tensor=stored, box=box, sink=TensorSink(tensor)))
        data = StoredData(self.store, self.manifest)
        self.reads, self.comparisons = plan_reads(data, wants), plan_reads(data, compared)

    def check_complete(self, unexpected: list[str]) -> bytes:
        """Raise LayoutMismatch if ``strict`` and something is missing or left over."""
        if self.strict and (self.found.missing or unexpected):
            raise LayoutMismatch(
                f"{self.store.url}: state and checkpoint differ and nothing was loaded. Missing "
                f"in the checkpoint: {_some(self.found.missing)}. In the checkpoint but not asked "
                f"for: {_some(unexpected)}. Pass strict=False to load what both have"
            )
        return b""

    def restore(self) -> bytes:
        """Put the saved values into place and hand stateful objects their state."""
        for local in self.tensors.values():
            # The elements were stored past autograd, which must not trust what it kept of them.
            torch.autograd.graph.increment_version([tensor for _, tensor in local.parts])
        self.rebuild()
        for finish in self.found.finishers:
            finish()
        return b""

    def is_resharded(self, name: str, local: LocalTensor) -> bool:
        """Whether this rank holds other boxes now than the rank of its number held at the save."""
        layout = self.manifest.tensors[name].layout
        if isinstance(layout, IrregularLayout):
            return True
        coordinate = layout.mesh.coordinate(self.ranks.rank)
        return coordinate is None or [layout.box(coordinate)] != [box for box, _ in local.parts]

    def report(self, unexpected: list[str], bytes_read: int) -> LoadReport:
        needed = sum(
            box.numel * local.dtype.itemsize
            for local in self.tensors.values()
            for box, _ in local.parts
        )
        return LoadReport(
            url=self.store.url,
            loaded=(*self.tensors, *self.found.values),
            missing=tuple(self.found.missing),
            unexpected=tuple(unexpected),
            dropped=tuple(self.found.dropped),
            resharded=tuple(
                name
                for name, local in self.tensors.items()
                if local.layout is not None and self.is_resharded(name, local)
            ),
            bytes_needed=needed,
            bytes_read=bytes_read,
        )


def _in_all(lists: list[list[str]]) -> list[str]:
    common = set(lists[0]).intersection(*lists[1:])
    return [name for name in lists[0] if name in common]


def _unfit_destinations(value: Any, local: LocalTensor) -> list[str]:
    """Return what is wrong with the memory that a tensor or array is to be loaded into."""
    if isinstance(value, np.ndarray) and not is_shared(value):
        return [f"{local.name}: the numpy array is read-only or runs backwards; give a fresh one"]
    return [
        f"{local.name}: the destination of {box} overlaps itself in memory; clone it"
        for box, tensor in local.parts
        if overlaps_itself(tensor)
    ]


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
