"""Whether ranks that hold the same part of a tensor hold the same elements.

Each rank sends one hash per set of ranks with which it shares parts, over all of these together.
Only where two of them differ are the hashes of single parts compared, to name the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from dtckpt.errors import LayoutMismatch

from ..ranks.text import ranks_text
from ..ranks.together import Answers, Ranks, together
from ..tensors.local_tensor import LocalTensor
from ..tensors.spec import GlobalTensor, fingerprint

_Parts = dict[str, dict[str, str]]
"""Hash of every shared part by the set of ranks that hold it and its key."""


def compare_copies(
    ranks: Ranks,
    tensors: Iterable[GlobalTensor],
    held: Mapping[str, LocalTensor],
    *,
    must_agree: bool = True,
) -> tuple[str, ...]:
    """Return what disagrees, one line for each part of a tensor; the same on all ranks.

    Raises LayoutMismatch instead if copies ``must_agree``.
    """
    tensors = list(tensors)
    if not tensors or len(ranks.all) == 1:
        return ()
    parts: _Parts = {}

    def summary() -> bytes:
        parts.update(_shared_parts(tensors, held, ranks))
        whole = {key: fingerprint(_dump(found)).hex() for key, found in parts.items()}
        return _dump(whole)

    def find_suspects(answers: Answers) -> bytes:
        return _dump(sorted(_differing({r: json.loads(a) for r, a in answers.items()})))

    suspects: list[str] = json.loads(
        together(ranks, "save: compare copies", summary, find_suspects)
    )
    if not suspects:
        return ()

    def details() -> bytes:
        return _dump({k: v for key in suspects for k, v in parts.get(key, {}).items()})

    def tell(answers: Answers) -> bytes:
        found = {rank: json.loads(answer) for rank, answer in answers.items()}
        lines = [_describe(key, found) for key in _differing(found)]
        if must_agree:
            raise LayoutMismatch(
                "\n".join(lines[:20])
                + "\nGive different tensors different names, or bring the copies into step"
            )
        return _dump(lines)

    return tuple(json.loads(together(ranks, "save: compare copies", details, tell)))


def _shared_parts(
    tensors: list[GlobalTensor], held: Mapping[str, LocalTensor], ranks: Ranks
) -> _Parts:
    found: _Parts = {}
    for tensor in tensors:
        local = held.get(tensor.name)
        for box, digest in local.digests() if local is not None else ():
            ranks.tell_alive()
            holders = [] if box.is_empty else sorted(tensor.layout.replica_ranks(box))
            if len(holders) > 1:
                key = fingerprint(_dump(holders))[:8].hex()
                found.setdefault(key, {})[f"{tensor.name} {box}"] = digest
    return found


def _differing(found: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return the keys under which ranks gave different hashes."""
    first: dict[str, str] = {}
    differing: dict[str, None] = {}
    for given in found.values():
        for key, digest in given.items():
            if first.setdefault(key, digest) != digest:
                differing[key] = None
    return list(differing)


def _describe(key: str, found: Mapping[int, Mapping[str, str]]) -> str:
    by_digest: dict[str, list[int]] = {}
    for rank, given in found.items():
        if key in given:
            by_digest.setdefault(given[key], []).append(rank)
    name, _, box = key.rpartition(" ")
    camps = " and ".join(ranks_text(ranks) for ranks in by_digest.values())
    return f"tensor {name!r}: {box} has different values on {camps}"


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()
