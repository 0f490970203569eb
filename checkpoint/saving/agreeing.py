"""How ranks agree on the state of the whole job before anything is written.

All give 16 bytes: a hash of what they hold, of its values and of where they save to. Where these
are equal nothing else is said. Where they differ, ranks compare what of it differs, and of ranks
with the same description one speaks for all; ranks of sibling meshes, too, have the same one
(``outlines.py``). Tensors are compared without their elements, so a plan is remembered and serves
the next save; then even ranks of different stages have one and the same hash to give, that of the
agreement that they have come to before.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dtckpt.errors import LayoutMismatch

from ...dtensor.comm.caches import BoundedDict
from ...dtensor.geometry.box import Box
from ..files.stored_tensor import StoredTensor
from ..ranks.text import ranks_text
from ..ranks.together import Answers, Ranks, together
from ..state.tree import Node, packed_name, packed_nodes, per_rank_nodes
from ..tensors.spec import GlobalTensor, PerRankPart, TensorSpecs, Values, fingerprint
from .merging import (
    SpecReport,
    ValueReport,
    check_copies,
    merge_tensors,
    merge_values,
    packed_conflicts,
    per_rank_tensors,
    with_per_rank_parts,
)
from .outlines import Outline, Speakers, Told, print_of
from .writers import assign_writers

SAVE_ID_BYTES = 8
MERGE_PHASE = "save: agree"
"""The phase in which the states of ranks are merged."""
_MAX_PLANS = 16
"""Of which the eight used last are always there."""
_UNKNOWN = bytes(16)
_TERM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What one rank says of its part of the state."""

    specs: TensorSpecs
    values: Values
    own: PerRankPart
    terms: Mapping[str, str]
    """Arguments that all ranks must have given alike, where they save to among them."""
    expand: Callable[[Node, Sequence[str]], Node]
    """Returns a tree in which the packed values of some names are nodes for each value."""

    def expanded(self, names: Sequence[str]) -> Description:
        """Return the same without the packed values of some names, which ranks have to merge."""
        gone = {packed_name(n) for n in packed_nodes(self.values.tree)}.intersection(names)
        values = replace(
            self.values,
            tree=self.expand(self.values.tree, names),
            digests={name: told for name, told in self.values.digests.items() if name not in gone},
        )
        specs = {name: spec for name, spec in self.specs.items() if name not in gone}
        return replace(self, specs=specs, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """The tensors of the whole job, as far as ranks share them, and who writes them."""

    agreement: bytes
    """Hash of what every rank said of its tensors."""
    tensors: tuple[GlobalTensor, ...]
    stored: tuple[StoredTensor, ...]
    chunks: tuple[tuple[StoredTensor, Box], ...]
    """What this rank writes of them."""


class PlanMemory(BoundedDict[bytes, SharedPlan]):
    """The last plans of a rank by the fingerprint of what it had said of its tensors."""

    def __init__(self) -> None:
        super().__init__(_MAX_PLANS)

    def keep(self, specs: bytes, plan: SharedPlan) -> None:
        """Remember a plan as the last one that was used."""
        self.pop(specs, None)
        self.put(specs, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a rank knows once all have agreed."""

    save_id: str
    tensors: tuple[GlobalTensor, ...]
    """Tensors that ranks share."""
    stored: tuple[StoredTensor, ...]
    """What is written: of all ranks on the coordinator, elsewhere without what others keep for
    themselves."""
    chunks: tuple[tuple[StoredTensor, Box], ...]
    """What this rank writes."""
    tree: Node
    """The whole tree on the coordinator; None elsewhere."""

    @property
    def shared(self) -> tuple[StoredTensor, ...]:
        """What is written of the tensors that ranks share; every rank knows all of it."""
        return self.stored[: len(self.tensors)]


def agree(
    ranks: Ranks, memory: PlanMemory, phase: str, describe: Callable[[], Description]
) -> Agreement:
    """Return the state of all ranks, or raise the same error on each of them."""
    return _Agreeing(ranks, memory, phase).run(describe)


@dataclass(slots=True)
class _Agreeing:
    ranks: Ranks
    memory: PlanMemory
    phase: str
    said: Description = field(init=False)
    outline: Outline = field(init=False)
    prints: bytes = field(init=False)
    specs: bytes = field(init=False)
    values: bytes = field(init=False)
    known: SharedPlan | None = field(init=False)
    tree: Node = None
    parts: list[PerRankPart] = field(default_factory=list[PerRankPart])

    def run(self, describe: Callable[[], Description]) -> Agreement:
        def token() -> bytes:
            self.say(describe())
            shared = self.known.agreement if self.known else self.specs
            return fingerprint(shared, self.values, json.dumps(self.said.terms).encode())

        def compare(answers: Answers) -> bytes:
            verdict = {
                "equal": len(set(answers.values())) == 1,
                "save_id": secrets.token_hex(SAVE_ID_BYTES),
            }
            return json.dumps(verdict).encode()

        verdict = json.loads(together(self.ranks, self.phase, token, compare))
        if verdict["equal"]:
            report = SpecReport.of(self.ranks.all, self.said.specs)
            plan = self.known or self.plan_of(merge_tensors([report]), self.specs)
            self.tree = self.said.values.tree
            has_per_rank = bool(self.said.own.nodes)
        else:
            plan, has_per_rank = self.settle()
        self.memory.keep(self.specs, plan)
        own = self.stored_per_rank(has_per_rank)
        return Agreement(
            save_id=verdict["save_id"],
            tensors=plan.tensors,
            stored=plan.stored + own,
            chunks=plan.chunks + self.chunks_of(own),
            tree=self.tree,
        )

    def say(self, said: Description) -> None:
        """Take what this rank says of its part of the state, and hash it."""
        self.said = said
        self.outline = Outline.of(said.specs)
        self.prints = self.outline.prints()
        self.specs = print_of(self.prints)
        self.values = fingerprint(said.values.to_bytes())
        self.known = self.memory.get(self.specs)

    def plan_of(self, tensors: tuple[GlobalTensor, ...], agreement: bytes) -> SharedPlan:
        stored = assign_writers(tensors)
        return SharedPlan(
            agreement=agreement, tensors=tensors, stored=stored, chunks=self.chunks_of(stored)
        )

    def chunks_of(self, stored: tuple[StoredTensor, ...]) -> tuple[tuple[StoredTensor, Box], ...]:
        rank = self.ranks.rank
        return tuple((tensor, box) for tensor in stored for box in tensor.chunks_of(rank))

    def settle(self) -> tuple[SharedPlan, bool]:
        """Find out what differs and merge it; return the plan and whether ranks keep anything.

        Packed values that differ are told anew as nodes first.
        """
        while True:
            found = self.merged()
            if not isinstance(found, list):
                return found
            self.say(self.said.expanded(found))

    def merged(self) -> tuple[SharedPlan, bool] | list[str]:
        """Merge what ranks say; or return the packed values that cannot be merged as they are."""
        chosen: dict[str, Any] = json.loads(
            together(self.ranks, "save: compare", self.record, self.choose_speakers)
        )
        speakers = Speakers.from_json(chosen["specs"])
        value_groups = {ranks[0]: tuple(ranks) for ranks in chosen["values"]}
        rank = self.ranks.rank
        tensors: list[tuple[GlobalTensor, ...]] = []

        def speak() -> bytes:
            own = speakers.told_by(rank, self.outline)
            values = self.said.values.to_bytes().decode() if rank in value_groups else None
            return json.dumps([own.to_json(), values]).encode() if own or values else b""

        def merge(answers: Answers) -> bytes:
            told = {r: json.loads(answer) for r, answer in answers.items() if answer}
            values: list[ValueReport] = [
                (group, Values.from_bytes(told[r][1].encode())) for r, group in value_groups.items()
            ]
            conflicts = packed_conflicts(values)
            if conflicts:
                return json.dumps({"expand": conflicts}).encode()
            whole = Told.joined(Told.from_json(own) for own, _ in told.values())
            tensors.append(merge_tensors(speakers.reports(whole)))
            self.tree = merge_values(values)
            has_per_rank = any(True for _ in per_rank_nodes(self.tree))
            return json.dumps([whole.to_json(), has_per_rank]).encode()

        merged = json.loads(together(self.ranks, MERGE_PHASE, speak, merge))
        if isinstance(merged, dict):
            return cast(dict[str, list[str]], merged)["expand"]
        whole, has_per_rank = merged
        if not speakers.groups:
            return cast(SharedPlan, self.known), has_per_rank
        if not tensors:
            tensors.append(merge_tensors(speakers.reports(Told.from_json(whole))))
        return self.plan_of(tensors[0], bytes.fromhex(chosen["agreement"])), has_per_rank

    def record(self) -> bytes:
        """Return what the token was made of, and more: hashes, of 16 bytes, or 8 for terms."""
        known = self.known.agreement if self.known else _UNKNOWN
        terms = [fingerprint(term.encode())[:_TERM_BYTES] for term in self.said.terms.values()]
        return b"".join([self.values, known, *terms, self.prints])

    def choose_speakers(self, answers: Answers) -> bytes:
        """Return who has the same and who tells of it; of tensors only unless all know the plan."""
        end = 32 + _TERM_BYTES * len(self.said.terms)
        _check_terms(self.said.terms, {rank: record[32:end] for rank, record in answers.items()})
        values: dict[bytes, list[int]] = {}
        for rank, record in answers.items():
            values.setdefault(record[:16], []).append(rank)
        agreements = {record[16:32] for record in answers.values()}
        is_known = len(agreements) == 1 and agreements != {_UNKNOWN}
        prints = {} if is_known else {rank: record[end:] for rank, record in answers.items()}
        return json.dumps(
            {
                "specs": Speakers.of(prints).to_json(),
                "agreement": fingerprint(*prints.values()).hex(),
                "values": list(values.values()),
            }
        ).encode()

    def stored_per_rank(self, has_per_rank: bool) -> tuple[StoredTensor, ...]:
        """Return the tensors that ranks keep for themselves, and put their values into the tree."""
        if not has_per_rank:
            return ()
        parts: dict[int, PerRankPart] = {self.ranks.rank: self.said.own}

        def collect(answers: Answers) -> bytes:
            parts.update({r: PerRankPart.from_bytes(answer) for r, answer in answers.items()})
            check_copies(parts)
            self.tree = with_per_rank_parts(self.tree, parts.values())
            return b""

        together(self.ranks, "save: values of each rank", self.said.own.to_bytes, collect)
        found = [tensor for rank, part in parts.items() for tensor in per_rank_tensors(rank, part)]
        return assign_writers(found)


def _check_terms(own: Mapping[str, str], records: Mapping[int, bytes]) -> None:
    """Raise LayoutMismatch, naming argument and ranks, where ranks were called otherwise."""
    first_rank, first = next(iter(records.items()))
    for number, (name, value) in enumerate(own.items()):
        at = slice(number * _TERM_BYTES, (number + 1) * _TERM_BYTES)
        others = [rank for rank, record in records.items() if record[at] != first[at]]
        if others:
            raise LayoutMismatch(
                f"the ranks were not given the same {name}: {ranks_text(others)} another one than "
                f"rank {first_rank}, which has {value or None!r}. Give it to all alike: a path "
                "made from the clock differs from rank to rank. Two threads may not save over one "
                "process group at the same time either, as they meet each other's calls; give each "
                "a group of its own, or save with no_dist"
            )
