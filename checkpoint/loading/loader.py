"""Loading: match, prove that every byte is there, then read straight into the destinations."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch, NotCommitted, ObjectNotFound
from dtckpt.logs import logger_of

from ...storage.base import Store
from ..files.blocks import digest
from ..files.manifest import Manifest
from ..formats.opening import (
    ManifestText,
    is_replaced,
    manifest_text,
    open_place,
    parse_manifest,
    stored_data,
)
from ..mapping.table import TensorMapping, mapped_manifest, table_of
from ..optimizers.fresh_state import adopt_parameters
from ..ranks.together import DEFAULT_TIMEOUT, Answers, Ranks, closing, ranks_of, together
from ..reading import limits
from ..reading.to_tensors import read_whole
from ..sharing.host_memory import HostMemory
from ..sharing.read_once import Offer, may_share_memory, why_alone
from ..state.collector import paused_collector
from ..state.renaming import Rename
from ..state.tree import Stateful
from ..timing.bars import OnProgress
from ..timing.recorder import Recorder
from ..timing.sharing import last_round
from .casting import DTypePolicy
from .decision import Decision, Matched
from .destinations import Destinations
from .differences import refuse_differences, refuse_idle, refuse_left_out
from .filling import Filling
from .match import Match
from .matching import match
from .options import LoadOptions, Strict
from .report import LoadReport
from .shared_memory import SharedMemory
from .valueless import find_valueless

logger = logger_of("checkpoint")

ATTEMPTS = 5
"""How often a load is tried where another save replaces the checkpoint each time: a job that
overwrites one path all the time is not waited for without end."""


def load(
    state_dict: Mapping[Any, Any] | Stateful,
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    process_group: Any = None,
    no_dist: bool = False,
    strict: Strict = True,
    select: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    mapping: TensorMapping | None = None,
    dtype_policy: DTypePolicy = "error",
    device: torch.device | str | None = None,
    read_once: bool | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    on_progress: OnProgress | None = None,
) -> LoadReport:
    """Fill ``state_dict`` from a checkpoint, whatever layout it was saved with.

    It is a dict (or another mapping), or an object with ``state_dict()`` and ``load_state_dict()``.

    Tensors are filled in place: DTensors of any mesh and placement, plain tensors (each rank gets
    the whole), numpy arrays. Other leaves are replaced in their containers by the saved value.
    Objects with ``load_state_dict()`` are given their filled state dict at the end, in the order of
    their names, which all ranks share; a torch optimizer that has made no step yet is loaded
    without one. State of optimizers goes to the parameters that it was saved for, by the names of
    these in the state, or those that the optimizer was given (``named_parameters()``). Objects
    that tell such names are asked for them though they are not selected. Where a name may mean
    several parameters, or names were saved and nothing tells those of now, the load is refused;
    where none were saved, state goes to parameters of the same number, with every shape compared,
    which the report lists as ``by_position``. Tensors on the meta device are
    replaced in their containers, parameters and buffers in their modules, by real ones on
    ``device`` (by default that of the mesh of a DTensor, else the CPU), which get their memory
    once the load is certain to fit. Tied ones stay tied, and an optimizer over such parameters
    follows if it is in the same state. An object that wraps a module has to pass them on itself
    (``load_state_dict(..., assign=True)``). Tensors that no state dict has, such as buffers that
    are not persistent, have no values then: a warning and the report (``without_values``) name
    them. So do they name parameters that were tied at the save and are not tied now (``untied``),
    as after ``to_empty()``, which leaves such buffers with any content.

    Every rank of ``process_group`` calls this; without a group this process alone does. ``strict``
    requires that the checkpoint has every leaf of the state and that some rank asks for every leaf
    of the checkpoint; False neither, and the report lists what was left out. ``"state"`` requires
    the first alone, but for dicts of nothing, and takes lists of plain values, and tuples, as one
    value each, as torch.distributed.checkpoint does.

    ``select`` limits all of this to some leaves of the checkpoint: a pattern, or several, of which
    each has to select something. ``"model"`` means that leaf or all below it; ``*`` in
    ``"model/*.bias"`` stands for any characters. All else in the state stays as it is.

    ``rename`` gives, for names in the state, the names in the checkpoint: a mapping of names or
    beginnings of names, ``{"model": "ema"}`` to load ``model/w`` from ``ema/w``, in which ``""``
    stands for the whole; of patterns of whole names, as the command takes them,
    ``{"model/h.{i}.{rest*}": "net/layers.{i}.{rest*}"}``; or a function that is given every name.
    Patterns of ``select`` and the report are about names in the checkpoint.

    ``mapping`` is a table of rules, or a list of them, through which the checkpoint is seen: its
    tensors are split, merged, permuted, stacked and moved as they say before anything is matched,
    and each rank reads the bytes that its own parts are made of. All other names, in ``select``,
    ``rename`` and the report, are then those that the mapping gives. All ranks give the same.

    ``dtype_policy`` says what happens where a tensor was saved with another dtype: ``"error"``, or
    conversion if no value can change (``"widen"``), or any conversion (``"cast"``).

    ``read_once`` lets ranks read once what several of them would read and send it to each other:
    what replicas hold, and the blocks of which they hold different parts, as where a checkpoint
    of row shards is loaded as column shards. By default ranks of one host do so by memory that
    they share, for tensors of which blocks would be read at least twice, but from local disks not
    for replicas, which cost no more each by itself. Where they have no such memory they do where
    reading is dear, from an object store or on several hosts: for what at least 4 ranks want, and
    for such tensors. It needs layouts on exactly the ranks of the load. All
    ranks agree that what was read is intact before it is sent, so a failure leaves no rank waiting
    in a collective; a rank that dies or falls silent while it sends is noticed by the timeout of
    the process group.

    ``on_progress`` is called with the bytes that this rank has read and those that it will read in
    all, one call at a time, from the threads that read; what it raises fails the load.

    A rank that shows no sign of life for ``timeout`` while others wait for it is given up.

    Raises the same error on every rank: NotCommitted, Corrupt, LayoutMismatch, StorageError,
    RankFailed. All that manifest, headers and sizes can tell is checked before any destination
    changes. A damaged block is found as it is read; the Corrupt error then lists what was already
    overwritten. Where another save has replaced the checkpoint meanwhile, its manifest is read
    again, and all is loaded from that; ObjectNotFound where that happens five times in a row.
    """
    options = LoadOptions(
        strict=strict,
        select=select,
        rename=rename,
        mapping=None if mapping is None else table_of(mapping),
        dtype_policy=dtype_policy,
        device=device,
        read_once=read_once,
        allow_pickle=allow_pickle,
        storage=storage_options or {},
        on_progress=on_progress,
    )
    ranks = ranks_of(
        process_group, no_dist=no_dist, timeout=timeout, purpose="load", target=checkpoint_id
    )
    with closing(ranks):
        group = process_group or _world()
        failed: list[CheckpointError] = []
        while True:
            running = _Load(ranks, group, options)
            try:
                report = running.run(state_dict, checkpoint_id)
            except (Corrupt, ObjectNotFound) as error:
                if not running.is_replaced():
                    raise
                failed.append(error)
            else:
                for error in failed:
                    running.check_covers(error, report)
                return report
            finally:
                running.close()
            if len(failed) == ATTEMPTS:
                raise _replaced_again(failed) from failed[-1]
            logger.info(
                "the checkpoint was replaced while it was loaded, and is loaded anew: %s",
                failed[-1],
            )


def _replaced_again(failed: Sequence[CheckpointError]) -> ObjectNotFound:
    """Return the error of a load of which each attempt met another save; the same on all ranks."""
    error = ObjectNotFound(
        f"load: another save has replaced the checkpoint each of the {len(failed)} times that it "
        "was read. Load it while nobody overwrites it, or have each save take a path of its own. "
        f"The last error: {failed[-1]}"
    )
    error.overwritten = tuple({name: None for one in failed for name in one.overwritten})
    return error


def _world() -> Any:
    distributed = torch.distributed
    return distributed.group.WORLD if distributed.is_available() else None


class _Load:
    """One load on one rank; holds what the phases hand on."""

    store: Store
    """On the coordinator, which reads them."""
    manifest: Manifest
    found: Match
    destinations: Destinations
    shared_memory: SharedMemory
    filling: Filling
    decision: Decision

    def __init__(self, ranks: Ranks, group: Any, options: LoadOptions) -> None:
        self.ranks = ranks
        self.group = group
        self.options = options
        self.made = ManifestText()
        self.has_manifest = False
        self.num_local = 1
        """Ranks on this host, or on the one that has most of them."""
        self.memory: HostMemory | None = None
        """What the ranks may share, if they are on one host."""
        self.recorder = Recorder("load", ranks)

    def run(
        self, state: Mapping[Any, Any] | Stateful, target: str | os.PathLike[str] | Store
    ) -> LoadReport:
        """Take this rank through the load: three rounds between ranks, and more where they must.

        Ranks check together before they read only where one of them has something to refuse or to
        compare, or may read for others; and they agree on the end only where code of the user has
        a part in it.
        """
        ranks = self.ranks
        told = together(ranks, "load: read manifest", lambda: self.open(target), self.give_manifest)
        self.has_manifest = True
        head, _, manifest = told.partition(b"\n")
        url, alone, mapping, num_local, place = json.loads(head)
        self.num_local = num_local
        decision = together(
            ranks,
            "load: plan",
            lambda: self.match(state, url, manifest, mapping, place, is_alone=bool(alone)),
            self.decide,
        )
        self.decision = Decision.from_bytes(decision)
        if self.decision.must_check:
            together(ranks, "load: check", self.check)
        self.filling.run(is_last=not self.decision.calls_back)
        if self.decision.calls_back:
            last_round(ranks, self.recorder, "load: restore", self.restore)
        else:
            self.restore()
        report = self.report()
        self.log(report)
        return report

    def is_replaced(self) -> bool:
        """Whether another save has replaced what was loaded since; asked by all after a failure."""
        if not self.has_manifest:  # on any rank: the first round has failed
            return False

        def look(_: Answers) -> bytes:
            try:
                return b"1" if is_replaced(self.store, self.made) else b""
            except CheckpointError:
                return b""  # what the load failed with says more

        return bool(together(self.ranks, "load: look again", bytes, look))

    def check_covers(self, first: CheckpointError, report: LoadReport) -> None:
        """Raise the error of the first attempt if it overwrote what this one has filled nowhere."""
        if not first.overwritten:  # the same on all ranks
            return

        def tell_left() -> bytes:
            left = set(first.overwritten).difference(report.loaded, report.tied)
            return json.dumps(sorted(left)).encode()

        def decide(answers: Answers) -> bytes:
            if set.intersection(*(set(json.loads(left)) for left in answers.values())):
                raise first
            return b""

        together(self.ranks, "load: compare with before", tell_left, decide)

    def close(self) -> None:
        """Let go of memory that the ranks have shared."""
        if self.memory is not None:
            self.memory.close()

    def log(self, report: LoadReport) -> None:
        """Log what this rank did for the load."""
        if not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            "loaded %s: rank %d filled %d bytes of %d tensors in %.3f s; it read %d bytes and got "
            "%d from other ranks (%s); %s",
            report.url,
            self.ranks.rank,
            report.bytes_needed,
            len(self.destinations.tensors),
            report.costs.seconds,
            report.bytes_read,
            report.bytes_received,
            report.read_once_reason or "each rank reads for itself",
            report.costs.line(),
        )

    def open(self, target: str | os.PathLike[str] | Store) -> bytes:
        """Open the store; the coordinator reads the manifest."""
        self.store = open_place(target, **self.options.storage)
        if self.ranks.is_coordinator:
            with self.recorder.phase("manifest") as phase:
                self.made = manifest_text(self.store)
                phase.num_bytes = len(self.made.text)
        return self.offer().to_bytes()

    def offer(self) -> Offer:
        """Return what this rank can tell before anything is matched."""
        return Offer(self.options.read_once, socket.gethostname())

    def give_manifest(self, answers: Answers) -> bytes:
        """Return where it was read, why ranks do not exchange what they read, and the manifest.

        And how many ranks a host has, and memory that they may share if there is one host.
        """
        offers = list(map(Offer.from_bytes, answers.values()))
        num_local = max(Counter(offer.host for offer in offers).values())
        if may_share_memory(offers):
            self.memory = HostMemory.make(num_local, limits.slot_bytes(self.store))
        place = self.memory.place if self.memory is not None else ""
        alone = why_alone(offers, self.store, in_memory=False)
        head = json.dumps([self.store.url, alone, self.mapping_digest(), num_local, place])
        return head.encode() + b"\n" + self.made.text

    def mapping_digest(self) -> str:
        """Return what tells whether ranks see the checkpoint through the same mapping."""
        mapping = self.options.mapping
        return "" if mapping is None else digest(mapping.to_bytes()).hex()

    def check_same(self, url: str, manifest: bytes) -> None:
        """Raise LayoutMismatch if this rank was given a path where another checkpoint is."""
        if self.store.url == url:
            return
        try:
            found = manifest_text(self.store).text
        except NotCommitted:
            found = None
        # What has no checksums may differ although the headers of its files are alike.
        if found != manifest or not parse_manifest(manifest, url).is_ours:
            what = "no checkpoint" if found is None else "another checkpoint"
            what = what if found != manifest else "files without checksums, perhaps others,"
            raise LayoutMismatch(
                f"the ranks were not given the same checkpoint_id: this rank has {self.store.url}, "
                f"where {what} is, and rank {self.ranks.all[0]} has {url}. Give it to all alike"
            )

    def match(
        self,
        state: Mapping[Any, Any] | Stateful,
        url: str,
        manifest: bytes,
        mapping: str,
        place: str,
        *,
        is_alone: bool,
    ) -> bytes:
        """Match the state and return what the others must know of it.

        What this rank reads is planned at once unless it may share that with others.
        """
        self.check_same(url, manifest)
        if mapping != self.mapping_digest():
            raise LayoutMismatch(
                f"{url}: this rank was given another mapping= than rank {self.ranks.all[0]}. Give "
                "the same to all"
            )
        self.options.check()
        with paused_collector(), self.recorder.phase("match"):
            stored = parse_manifest(manifest, self.store.url, self.made.seen)
            self.manifest = mapped_manifest(stored, self.options.mapping, self.store.url)
            data = stored_data(self.store, self.manifest)
            self.found = found = match(
                state,
                self.manifest,
                options=self.options,
                ranks=self.ranks,
                where=self.store.url,
                read=partial(read_whole, data),
            )
            refuse_left_out(found, self.manifest, self.store.url)
            self.destinations = Destinations(found, self.manifest, self.options, self.store.url)
            if len(self.ranks.all) > 1:
                self.destinations.check_rank(self.ranks.rank)
            if place and self.memory is None:
                self.memory = HostMemory.open(place)
            self.filling = Filling(
                self.destinations,
                data,
                self.ranks,
                self.group,
                self.recorder,
                self.options.on_progress,
                self.num_local,
                self.memory,
            )
            self.shared_memory = self.destinations.shared_memory()
            offer = self.offer()
            if place or not is_alone:
                offer = self.filling.offer(offer, found.own, may_exchange=not is_alone)
            if not offer.has_something:
                with self.recorder.phase("plan"):
                    self.filling.plan(share=False, in_memory=False)
        return Matched(
            unexpected=found.unexpected_mask(),
            is_complete=not (self.options.strict and found.missing),
            strict=self.options.wants_all,
            idle=found.idle,
            compares=bool(self.shared_memory),
            offer=offer,
            calls_back=found.calls_back,
        ).to_bytes()

    def decide(self, answers: Answers) -> bytes:
        """Return what all ranks are to know; runs on the coordinator."""
        told = list(map(Matched.from_bytes, answers.values()))
        return Decision.of(told, self.store).to_bytes()

    def check(self) -> bytes:
        """Raise LayoutMismatch if state and checkpoint differ in what they may not.

        So, too, where destinations that share memory were saved with other values.
        Else plan the reads of a rank that had to know first which ranks read what.
        """
        where, decision = self.store.url, self.decision
        refuse_idle(decision.idle, where)
        if self.options.strict:
            unexpected = self.found.names_of_mask(decision.unexpected)
            unwanted = unexpected if self.options.wants_all else ()
            refuse_differences(self.found, unwanted, self.ranks.rank, where)
        if self.shared_memory:
            self.filling.compare(self.shared_memory)
        if not self.filling.is_planned:
            with paused_collector(), self.recorder.phase("plan"):
                self.filling.plan(share=decision.read_once, in_memory=decision.in_memory)
        return b""

    def restore(self) -> bytes:
        """Put the saved values into place and hand stateful objects their state."""
        with self.recorder.phase("fill"):
            self.destinations.note_change()
            self.found.rebuild()
            for finish in self.found.in_order():
                finish(self.destinations.replaced)
                self.ranks.tell_alive()
            for value in self.found.objects.values():
                # Those that are not loaded would go on with parameters that nobody has any more.
                if isinstance(value, torch.optim.Optimizer):
                    adopt_parameters(value, self.destinations.replaced)
        return b""

    def report(self) -> LoadReport:
        """Return what was done, as this rank saw it."""
        destinations, found, decision = self.destinations, self.found, self.decision
        tensors = destinations.tensors
        valueless = find_valueless(found, tensors, destinations.stored_names())
        if text := valueless.warning():
            logger.warning("%s: %s", self.store.url, text)
        return LoadReport(
            url=self.store.url,
            loaded=(*tensors, *found.values),
            missing=tuple(found.missing),
            tied=found.tied,
            unexpected=tuple(found.names_of_mask(decision.unexpected)),
            dropped=tuple(found.dropped),
            kept=tuple(found.kept),
            dealt=tuple(found.dealt),
            cleared=tuple(found.cleared),
            by_position=tuple(found.by_position),
            without_values=valueless.tensors,
            untied=valueless.untied,
            resharded=tuple(destinations.resharded(self.ranks.rank)),
            cast=destinations.casts(),
            bytes_needed=destinations.num_bytes,
            bytes_read=self.filling.bytes_read,
            bytes_received=self.filling.bytes_received,
            read_once=decision.read_once,
            read_once_reason=decision.reason,
            costs=self.recorder.costs(self.store.url),
        )
