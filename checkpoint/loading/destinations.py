"""What one rank fills: shown to fit what was saved, before anything changes."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from dtckpt.errors import CheckpointError, LayoutMismatch

from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..reading.wants import Fill, Want, stored_wants
from ..sharing.exchanging import Destination
from ..sharing.striping import Striped
from ..tensors.gathered import refuse_to_fill_gathered
from ..tensors.local_shard import LocalShard
from ..tensors.local_tensor import LocalTensor, is_shared, local_tensor
from ..tensors.materialising import (
    Replaced,
    is_meta,
    materialise,
    stand_in,
    will_be_host_memory,
)
from ..tensors.overlaps import find_sharing, overlaps_itself
from ..tensors.sink import Sink
from ..tensors.ties import find_ties
from ..tensors.transfer import SinkToCome, TensorSink, in_huge_pages
from .casting import ConvertingSink, DTypePolicy, is_lossless, may_convert
from .match import Match
from .options import LoadOptions
from .shared_memory import Part, SharedMemory


class Destinations:
    """The tensors that one rank fills, by the names of the stored ones."""

    def __init__(self, found: Match, manifest: Manifest, options: LoadOptions, where: str) -> None:
        """Raise LayoutMismatch where something does not fit; ``where`` is the checkpoint's URL."""
        self.held = found.destinations
        """Tensors and arrays as the caller has them; those without memory are replaced."""
        self._stored = manifest.tensors
        self._options = options
        self._where = where
        self.replaced = Replaced()
        """What takes the place of tensors without memory."""
        self._sinks_to_come: list[tuple[SinkToCome, str, int]] = []
        """Those of tensors without memory, each with the name and the position of the part."""
        stand_ins = Replaced()

        def local(name: str, value: Any) -> LocalTensor:
            return local_tensor(name, stand_in(value, stand_ins) if is_meta(value) else value)

        self.tensors: dict[str, LocalTensor] = {
            name: local(name, value) for name, value in self.held.items()
        }
        refuse_to_fill_gathered(self.tensors, where)
        if found.absent:
            absent: dict[str, LocalTensor] = {}
            for name, value in found.absent.items():
                with suppress(CheckpointError):  # of a kind that no checkpoint has: tied to nothing
                    absent[name] = local(name, value)
            found.note_ties(find_ties(self.tensors | absent))
        self._check_fit(found.problems)
        if options.device is not None and any(map(is_meta, self.held.values())):
            torch.empty(0, device=options.device)  # raises where there is no such device
        parts = [tensor for local in self.tensors.values() for _, tensor in local.parts]
        self._sharing = find_sharing(parts)
        """Parts, by their numbers over all tensors, that share memory with others."""

    def _check_fit(self, problems: Iterable[str]) -> None:
        """Raise LayoutMismatch unless shapes, dtypes and kinds of all leaves agree."""
        policy = self._options.dtype_policy
        problems = list(problems)
        for name, local in self.tensors.items():
            problem = _unfit(self._stored.get(name), local, self.held[name], policy)
            if problem:
                problems.append(problem)
        if problems:
            raise LayoutMismatch(
                f"{self._where}: {len(problems)} leaves do not fit and nothing was loaded:\n  "
                + "\n  ".join(problems[:20])
            )

    def shared_memory(self) -> SharedMemory:
        """Return what shares memory, and was saved apart: state of such memory fits it."""
        sharing = self._sharing
        if not sharing.tied and not sharing.overlapping:
            return SharedMemory((), sharing)
        parts = [
            Part(name=name, stored=self._stored[name], box=box, tensor=tensor, dtype=local.dtype)
            for name, local in self.tensors.items()
            for box, tensor in local.parts
        ]
        return SharedMemory(parts, sharing)

    def check_rank(self, rank: int) -> None:
        """Raise LayoutMismatch for tensors with layouts beside them that are of another rank."""
        for name, value in self.held.items():
            if isinstance(value, LocalShard):
                self.tensors[name].check_rank(rank)

    def wants(self, elsewhere: Container[str]) -> list[Want]:
        """Return what this rank is to read into destinations; what is tied is read once.

        Tensors that are read ``elsewhere``, by other ranks for this one, are left out.
        """
        found: list[Want] = []
        index = 0
        for name, local in self.tensors.items():
            for number, (box, _) in enumerate(local.parts):
                if index not in self._sharing.tied and name not in elsewhere:
                    sink = self._sink(name, number)
                    found.append(Want(tensor=self._stored[name], box=box, sink=sink))
                index += 1
        return found

    def received(self, striped: Striped) -> tuple[dict[str, list[Destination]], list[Fill]]:
        """Return where stored tensors go that ranks read for each other, and what is filled."""
        found: dict[str, list[Destination]] = {name: [] for name in striped.tensors}
        fills: list[Fill] = []
        for name in striped.names:
            itemsize = self.tensors[name].dtype.itemsize
            for number, (box, _) in enumerate(self.tensors[name].parts):
                want = Want(tensor=self._stored[name], box=box, sink=self._sink(name, number))
                for made in stored_wants([want], exact=True):
                    if isinstance(made, Fill):
                        fills.append(made)
                    else:
                        key = striped.key(made.tensor.name, is_part=bool(made.made_for))
                        found[key].append(Destination(name, made.box, itemsize, made.sink))
        return found, fills

    def _sink(self, name: str, number: int) -> Sink:
        """Return what takes the saved elements of a part of a tensor."""
        local, saved = self.tensors[name], self._stored[name].dtype
        value, tensor = self.held[name], local.parts[number][1]
        sink: Sink
        if is_meta(value):
            sink = SinkToCome(is_memory=will_be_host_memory(value, self._options.device))
            self._sinks_to_come.append((sink, name, number))
        else:
            # Whatever of it has no page yet is filled by the reads.
            sink = TensorSink(in_huge_pages(tensor) if tensor.is_contiguous() else tensor)
        return sink if saved is local.dtype else ConvertingSink(sink, saved, local.dtype)

    def stored_names(self) -> dict[str, str]:
        """Return for every destination which stored tensor it is: the same for what was tied.

        Nothing where a mapping makes several tensors of one.
        """
        if self._options.mapping is not None:
            return {name: name for name in self.tensors}
        return {name: self._stored[name].stored_name for name in self.tensors}

    def materialise(self) -> None:
        """Give memory to destinations that have none."""
        for name, value in self.held.items():
            if is_meta(value):
                real = materialise(value, self.replaced, self._options.device)
                self.held[name] = real
                self.tensors[name] = local_tensor(name, real)
        for sink, name, number in self._sinks_to_come:
            sink.arrive(self.tensors[name].parts[number][1])
        self._sinks_to_come.clear()

    def tied_names(self) -> set[str]:
        """Return the names of destinations that share memory with others."""
        names = [name for name, local in self.tensors.items() for _ in local.parts]
        pairs = [*self._sharing.tied.items(), *self._sharing.overlapping]
        return {names[index] for pair in pairs for index in pair}

    def seen(self, names: Iterable[str]) -> list[str]:
        """Return those of some names whose tensors the caller can see: not memory that is new."""
        new = {id(value) for value in self.replaced.tensors.values()}
        return [name for name in names if id(self.held.get(name)) not in new]

    def note_change(self) -> None:
        """Tell autograd that tensors were filled past it, which must not trust what it kept."""
        parts = [tensor for local in self.tensors.values() for _, tensor in local.parts]
        # A DTensor counts for itself what is written to its local tensor. By its real class: what
        # only passes for a tensor ends the process.
        whole = [value for value in self.held.values() if issubclass(type(value), torch.Tensor)]
        torch.autograd.graph.increment_version([*parts, *whole])

    @property
    def num_bytes(self) -> int:
        """Bytes of all destinations."""
        return sum(t.nbytes for local in self.tensors.values() for _, t in local.parts)

    def casts(self) -> dict[str, tuple[str, str]]:
        """Return saved and wanted dtype, by their torch names, of tensors for which they differ."""
        return {
            name: (self._stored[name].dtype.torch_name, local.dtype.torch_name)
            for name, local in self.tensors.items()
            if self._stored[name].dtype is not local.dtype
        }

    def resharded(self, rank: int) -> list[str]:
        """Return the tensors of which the rank of this number held another part at the save."""
        laid_out = [(n, t, self._stored[n].layout) for n, t in self.tensors.items() if t.layout]
        layouts = {id(saved): saved for _, _, saved in laid_out}
        held = {key: list(saved.held_by(rank)) for key, saved in layouts.items()}
        return [
            name
            for name, local, saved in laid_out
            if held[id(saved)] != [b for b, _ in local.parts] and saved != local.layout
        ]


def _unfit(
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


def _dtype_hint(stored: StoredTensor, local: LocalTensor, policy: DTypePolicy) -> str:
    saved, wanted = stored.dtype, local.dtype
    if policy == "error" and is_lossless(saved.torch_name, wanted.torch_name):
        return '; pass dtype_policy="widen" to convert it without loss'
    if policy != "cast" and may_convert("cast", saved, wanted):
        return (
            f"; give a destination of {saved.torch_name}, or, to convert it with loss, pass "
            'dtype_policy="cast"'
        )
    return "; there is no such conversion" if policy == "cast" else ""
