"""What one rank loads: matched, shown to fit, and shown to be there, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.errors import LayoutMismatch

from ...storage.base import Store
from ..files.manifest import Manifest
from ..files.stored import StoredData
from ..ranks.together import Ranks
from ..reading.exchanging import Destination
from ..reading.plan import Read, plan_reads
from ..reading.wants import Sink, Want
from ..state.renaming import Renaming
from ..state.selecting import Selection
from ..state.stateful import Stateful
from ..tensors.local import LocalTensor, local_tensor, tensor_tag
from ..tensors.materialising import Replaced, is_meta, materialise, stand_in
from ..tensors.overlaps import Sharing, find_sharing
from ..tensors.transfer import TensorComparison, TensorSink
from .casting import POLICIES, ConvertingSink, DTypePolicy
from .fitting import unfit
from .matching import match


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Arguments of ``load``."""

    strict: bool
    allow_pickle: bool
    dtype_policy: DTypePolicy
    device: torch.device | str | None
    read_once: bool | None
    storage: Mapping[str, Any]


class LoadPlan:
    """What one rank loads, and into what."""

    reads: list[Read]
    """Reads into destinations."""
    comparisons: list[Read]
    """Reads for tied tensors: what is stored for each must be equal."""
    sharing: Sharing
    """Which of all parts of all tensors share memory."""

    def __init__(
        self,
        state: Mapping[Any, Any] | Stateful,
        manifest: Manifest,
        store: Store,
        *,
        ranks: Ranks,
        options: LoadOptions,
        selection: Selection | None,
        renaming: Renaming | None,
    ) -> None:
        """Match the state; raises where something does not fit."""
        if options.dtype_policy not in POLICIES:
            raise LayoutMismatch(
                f"dtype_policy={options.dtype_policy!r}: expected one of {', '.join(POLICIES)}"
            )
        self.store = store
        self.manifest = manifest
        self.ranks = ranks
        self.options = options
        self.found, self.rebuild = match(
            state,
            manifest.tree,
            manifest.tensors,
            ranks=ranks,
            tensor_tag=tensor_tag,
            allow_pickle=options.allow_pickle,
            where=store.url,
            selection=selection,
            renaming=renaming,
        )
        self.replaced = Replaced()
        stand_ins = Replaced()
        self.tensors: dict[str, LocalTensor] = {
            name: local_tensor(name, stand_in(value, stand_ins) if is_meta(value) else value)
            for name, value in self.found.destinations.items()
        }
        self.data = StoredData(store, manifest)
        self._check_fit()
        self._find_sharing()

    def _check_fit(self) -> None:
        """Raise LayoutMismatch unless shapes, dtypes and kinds of all leaves agree."""
        stored, policy = self.manifest.tensors, self.options.dtype_policy
        problems = list(self.found.problems)
        for name, local in self.tensors.items():
            problem = unfit(stored.get(name), local, self.found.destinations[name], policy)
            if problem:
                problems.append(problem)
        if problems:
            raise LayoutMismatch(
                f"{self.store.url}: {len(problems)} leaves do not fit and nothing was loaded:\n  "
                + "\n  ".join(problems[:20])
            )

    def _find_sharing(self) -> None:
        """Find destinations that share memory; LayoutMismatch where they share a part of it."""
        parts = [
            (name, tensor) for name, local in self.tensors.items() for _, tensor in local.parts
        ]
        self.sharing = find_sharing([tensor for _, tensor in parts])
        if self.sharing.overlapping:
            told = [f"{parts[a][0]} and {parts[b][0]}" for a, b in self.sharing.overlapping[:10]]
            raise LayoutMismatch(
                f"{self.store.url}: these destinations overlap in memory and nothing was loaded: "
                f"{'; '.join(told)}. Load into separate tensors"
            )

    def plan_reads(self, owned: Mapping[str, bool] | None = None) -> None:
        """Plan what to read into every destination, and what to compare with tied ones.

        Of tensors in ``owned`` only those that this rank reads for all are read. Raises Corrupt or
        LayoutMismatch where something is lost.
        """
        wants: list[Want] = []
        compared: list[Want] = []
        tied = self.sharing.tied
        names: list[str] = []
        for name, local in self.tensors.items():
            stored = self.manifest.tensors[name]
            for box, tensor in local.parts:
                names.append(name)
                first = tied.get(len(names) - 1)
                if first is None:
                    if owned is None or owned.get(name, True):
                        sink = self._converting(name, local, TensorSink(tensor))
                        wants.append(Want(tensor=stored, box=box, sink=sink))
                elif self._is_stored_apart(names[first], name):
                    sink = self._converting(name, local, TensorComparison(name, tensor))
                    compared.append(Want(tensor=stored, box=box, sink=sink))
        self.reads = plan_reads(self.data, wants)
        self.comparisons = plan_reads(self.data, compared) if compared else []

    def _converting(self, name: str, local: LocalTensor, sink: Sink) -> Sink:
        saved = self.manifest.tensors[name].dtype
        return sink if saved is local.dtype else ConvertingSink(sink, saved, local.dtype)

    def destinations(self, names: Iterable[str]) -> dict[str, Destination]:
        """Return where tensors of one part go."""
        found: dict[str, Destination] = {}
        for name in names:
            local = self.tensors[name]
            box, tensor = local.parts[0]
            sink = self._converting(name, local, TensorSink(tensor))
            found[name] = Destination(box, local.dtype.itemsize, sink)
        return found

    def _is_stored_apart(self, one: str, other: str) -> bool:
        """Whether two names have elements of their own in the checkpoint."""
        stored = self.manifest.tensors
        return (stored[one].same_as or one) != (stored[other].same_as or other)

    def materialise(self) -> bool:
        """Give memory to destinations that have none; return whether there were any."""
        destinations = self.found.destinations
        late = [name for name, value in destinations.items() if is_meta(value)]
        for name in late:
            real = materialise(destinations[name], self.replaced, self.options.device)
            destinations[name] = real
            self.tensors[name] = local_tensor(name, real)
        return bool(late)

    def tied_names(self) -> set[str]:
        """Return the names of destinations that are the memory of others."""
        names = [name for name, local in self.tensors.items() for _ in local.parts]
        return {names[index] for pair in self.sharing.tied.items() for index in pair}

    def restore(self) -> None:
        """Put the saved values into place and hand stateful objects their state."""
        # The elements were stored past autograd, which must not trust what it kept of them.
        parts = [tensor for local in self.tensors.values() for _, tensor in local.parts]
        torch.autograd.graph.increment_version(parts)
        self.rebuild()
        for finish in self.found.in_order():
            finish(self.replaced)
            self.ranks.tell_alive()

    def _is_resharded(self, name: str, local: LocalTensor) -> bool:
        """Whether this rank holds other boxes now than the rank of its number held at the save."""
        layout = self.manifest.tensors[name].layout
        if layout == local.layout:
            return False
        return list(layout.held_by(self.ranks.rank)) != [box for box, _ in local.parts]

    def resharded(self) -> list[str]:
        """Return the tensors of which this rank holds another part than at the save."""
        return [
            name
            for name, local in self.tensors.items()
            if local.layout is not None and self._is_resharded(name, local)
        ]
