"""Tensors without the ranks of their meshes, and who of all ranks tells of which.

Ranks of sibling meshes, such as the groups of a tensor parallel job, have the same tensors and
differ in nothing but which ranks their meshes list. So what is long is told once, by one rank for
all whose tensors have the same form, and each mesh by one of its ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dtensor.geometry.mesh import Mesh
from ..tensors.spec import FORMAT_VERSION, TensorSpecs, fingerprint, specs_from_json, specs_to_json
from .merging import RanksOfMeshes, SpecReport

_PRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Outline:
    """What one rank says of its tensors, in two parts."""

    form: str
    """JSON of names, dtypes, shapes, placements, and of the shapes and axes of meshes."""
    meshes: tuple[str, ...]
    """JSON of each mesh, its ranks included."""

    @classmethod
    def of(cls, specs: TensorSpecs) -> Outline:
        """Return the outline of specs."""
        value = specs_to_json(specs)
        meshes: list[dict[str, Any]] = value.pop("meshes")
        value["meshes"] = [[mesh["shape"], mesh["axes"]] for mesh in meshes]
        return cls(_dump([FORMAT_VERSION, value]), tuple(map(_dump, meshes)))

    def prints(self) -> bytes:
        """Return the fingerprint of the form, and that of each mesh."""
        return b"".join(fingerprint(text.encode()) for text in (self.form, *self.meshes))


def print_of(prints: bytes) -> bytes:
    """Return 16 bytes that differ where ranks have other tensors, or on other meshes."""
    return fingerprint(prints)


@dataclass(frozen=True, slots=True)
class Speakers:
    """Which ranks have the same tensors, and who tells of what."""

    groups: tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...] = ()
    """Ranks with the same tensors on the same meshes, the number of their form, those of meshes."""
    forms: tuple[int, ...] = ()
    """Who tells of each form."""
    meshes: tuple[tuple[int, int], ...] = ()
    """Who tells of each mesh, and as which of its own it has it."""

    @classmethod
    def of(cls, prints: Mapping[int, bytes]) -> Speakers:
        """Choose them by what ``Outline.prints`` is on each rank."""
        groups: dict[bytes, list[int]] = {}
        for rank, given in prints.items():
            groups.setdefault(given, []).append(rank)
        forms: dict[bytes, int] = {}
        meshes: dict[bytes, int] = {}
        by_form: list[int] = []
        by_mesh: list[tuple[int, int]] = []
        found: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []
        for given, ranks in groups.items():
            form, *own = (
                given[at : at + _PRINT_BYTES] for at in range(0, len(given), _PRINT_BYTES)
            )
            if forms.setdefault(form, len(forms)) == len(by_form):
                by_form.append(ranks[0])
            for place, mesh in enumerate(own):
                if meshes.setdefault(mesh, len(meshes)) == len(by_mesh):
                    by_mesh.append((ranks[0], place))
            found.append((tuple(ranks), forms[form], tuple(meshes[mesh] for mesh in own)))
        return cls(tuple(found), tuple(by_form), tuple(by_mesh))

    def to_json(self) -> list[Any]:
        """Return JSON."""
        return [self.groups, self.forms, self.meshes]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Speakers:
        """Return what ``to_json`` wrote."""
        groups, forms, meshes = value
        return cls(
            tuple((tuple(ranks), form, tuple(own)) for ranks, form, own in groups),
            tuple(forms),
            tuple((rank, place) for rank, place in meshes),
        )

    def told_by(self, rank: int, outline: Outline) -> Told:
        """Return what a rank is to tell of."""
        return Told(
            {n: outline.form for n, speaker in enumerate(self.forms) if speaker == rank},
            {n: outline.meshes[at] for n, (by, at) in enumerate(self.meshes) if by == rank},
        )

    def reports(self, told: Told) -> list[SpecReport]:
        """Return the tensors of all ranks, once all has been told."""
        meshes = {n: Mesh.from_json(json.loads(text)) for n, text in told.meshes.items()}
        groups: dict[int, list[RanksOfMeshes]] = {}
        for place, (ranks, form, own) in enumerate(self.groups):
            found = RanksOfMeshes(place, ranks, tuple(meshes[number] for number in own))
            groups.setdefault(form, []).append(found)
        return [
            SpecReport(_specs(told.forms[form], found[0].meshes), tuple(found))
            for form, found in groups.items()
        ]


@dataclass(frozen=True, slots=True)
class Told:
    """Forms and meshes by their numbers."""

    forms: dict[int, str]
    meshes: dict[int, str]

    def to_json(self) -> list[Any]:
        """Return JSON."""
        return [list(self.forms.items()), list(self.meshes.items())]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Told:
        """Return what ``to_json`` wrote."""
        forms, meshes = value
        return cls(dict(forms), dict(meshes))

    @classmethod
    def joined(cls, parts: Iterable[Told]) -> Told:
        """Return what ranks have told together."""
        whole = cls({}, {})
        for part in parts:
            whole.forms.update(part.forms)
            whole.meshes.update(part.meshes)
        return whole

    def __bool__(self) -> bool:
        return bool(self.forms or self.meshes)


def _specs(form: str, meshes: Sequence[Mesh]) -> TensorSpecs:
    _, value = json.loads(form)
    return specs_from_json(value, meshes)


def mesh_text(mesh: Mesh) -> str:
    """Return how an outline tells of a mesh."""
    return _dump(mesh.to_json())


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
