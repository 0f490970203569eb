"""Whether ranks that hold the same part of a tensor hold the same elements.

Each rank sends one hash per set of ranks with which it shares parts, over all of these together.
Only where two of them differ are the hashes of single parts compared, to name the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ..ranks.text import ranks_text
from ..ranks.together import Answers, Ranks, together
from ..tensors.local_tensor import LocalTensor
from ..tensors.sampling import Sampling
from ..tensors.spec import GlobalTensor, TensorSpecs, fingerprint

_Parts = dict[str, dict[str, str]]
"""Hash of every shared part by the set of ranks that hold it and its key."""


def digests_of_plain(
    ranks: Ranks,
    specs: TensorSpecs,
    held: Mapping[str, LocalTensor],
    sampling: Sampling | None,
) -> dict[str, str]:
    """Return the hashes of plain tensors, if there is anybody to compare them with."""
    digests: dict[str, str] = {}
    if len(ranks.all) > 1:
        for name, spec in specs.items():
            if spec.is_plain:
                known = digests.get(spec.same_as or "")
                digests[name] = known or next(held[name].digests(sampling))[1]
                ranks.tell_alive()
    return digests


def compare_copies(
    ranks: Ranks,
    tensors: Iterable[GlobalTensor],
    held: Mapping[str, LocalTensor],
    *,
    must_agree: bool = True,
    sampling: Sampling | None = None,
) -> tuple[str, ...]:
    """Return what disagrees, one line for each part of a tensor; the same on all ranks.

    With a ``sampling`` only what stands for large parts is compared. Raises LayoutMismatch instead
    if copies ``must_agree``.
    """
    tensors = list(tensors)
    if not tensors or len(ranks.all) == 1:
        return ()
    parts: _Parts = {}

    def summary() -> bytes:
        parts.update(_shared_parts(tensors, held, ranks, sampling))
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
    tensors: list[GlobalTensor],
    held: Mapping[str, LocalTensor],
    ranks: Ranks,
    sampling: Sampling | None,
) -> _Parts:
    found: _Parts = {}
    sets = _HolderSets(ranks.rank)
    for tensor in tensors:
        local = held.get(tensor.name)
        for box, digest in local.digests(sampling) if local is not None else ():
            ranks.tell_alive()
            if not box.is_empty and (key := sets.key(tensor.layout, box)):
                found.setdefault(key, {})[f"{tensor.name} {box}"] = digest
    return found


class _HolderSets:
    """Names the sets of ranks with which a rank shares parts: all of a set by one name.

    The ranks of a set may be thousands, so they are not listed for every tensor.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._keys: dict[tuple[Mesh, tuple[int, ...]], str] = {}

    def key(self, layout: Layout | IrregularLayout, box: Box) -> str:
        """Return the name of those that hold a box of this rank; none if nobody else does."""
        if isinstance(layout, IrregularLayout):
            holders = sorted(layout.replica_ranks(box))
            return _short(holders) if len(holders) > 1 else ""
        if layout.num_replicas == 1:
            return ""
        place = layout.mesh, layout.replica_axes
        if place not in self._keys:
            at = layout.mesh.coordinate(self._rank) or ()
            own = [i for axis, i in enumerate(at) if axis not in layout.replica_axes]
            self._keys[place] = _short([layout.mesh.to_json(), layout.replica_axes, own])
        return self._keys[place]


def _short(value: object) -> str:
    return fingerprint(_dump(value))[:8].hex()


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
