"""Tables of rules: applied to a checkpoint, undone, and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch

from ..copies.mapped import Mapped, mapped_tensor
from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..state.limits import check_metadata_bytes, list_of, object_of, parse_json, shown
from ..state.selecting import near_names
from ..state.tree import TENSORS, below, index_tree, tag_of
from .changes import MappingRule
from .dequantize import Dequantize
from .rule_json import rule_of_json, rule_to_json
from .trees import edited, with_moved_subclasses

_VERSION = 1


@dataclass(frozen=True, slots=True)
class MappingTable:
    """Rules that are applied one after the other, each to what those before have made.

    >>> from dtckpt.checkpoint import Move, Split
    >>> table = MappingTable([Move("model.{rest*}", "{rest*}"), Split("qkv", ("q", "k", "v"))])
    >>> MappingTable.from_json(table.to_json()) == table
    True
    >>> table.inverse().rules[0]
    Merge(sources=('q', 'k', 'v'), target='qkv', dim=0, sizes=None, groups=1)
    """

    rules: Sequence[MappingRule]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def inverse(self) -> MappingTable:
        """Return the table that undoes this one; LayoutMismatch, naming the rule, if one cannot."""
        return MappingTable([rule.inverse() for rule in reversed(self.rules)])

    def applied_to(self, manifest: Manifest, where: str, *, part: str = "") -> Manifest:
        """Return a checkpoint as it is seen through this table; ``where`` is its URL.

        Rules are given names below ``part``. Its tensors are read by what they are made of.
        LayoutMismatch, naming rule and tensor, where a rule fits nothing, or names and shapes do
        not go together.
        """
        stored = manifest
        first = list(takewhile(lambda rule: isinstance(rule, Dequantize), self.rules))
        for number, rule in enumerate(first):
            with _naming(where, number, rule):
                manifest = cast(Dequantize, rule).seen(
                    manifest, tensor_leaves(manifest, part), part
                )
        leaves = tensor_leaves(manifest, part)
        tensors = {leaf: Mapped.of(manifest.tensors[name]) for leaf, name in leaves.items()}
        makers: dict[str, MappingRule] = {}
        for number, rule in enumerate(self.rules[len(first) :], len(first)):
            with _naming(where, number, rule):
                _apply(rule, tensors, makers)
        stays = {leaf for leaf in leaves if leaf in tensors and leaf not in makers}
        try:
            tree = edited(
                manifest.tree,
                {below(part, leaf) for leaf in leaves.keys() - stays},
                [below(part, name) for name in tensors if name in makers],
            )
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{where}: the mapping: {error}") from error
        gone = {leaves[leaf] for leaf in leaves.keys() - stays}
        kept = {n: tensor for n, tensor in manifest.tensors.items() if n not in gone}
        named = {below(part, n): mapped for n, mapped in tensors.items() if n in makers}
        made = {
            name: mapped_tensor(name, mapped, manifest.tensors) for name, mapped in named.items()
        }

        def moved(name: str) -> str | None:
            tensor = made.get(name)
            return None if tensor is None or tensor.recipe else tensor.stored_name

        tree = with_moved_subclasses(
            manifest.tree, tree, lambda name: manifest.tensors[name].stored_name, moved
        )
        return replace(manifest, tree=tree, tensors=kept | made, stored=stored)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"mapping": _VERSION, "rules": list(map(rule_to_json, self.rules))}

    @classmethod
    def from_json(cls, value: object) -> MappingTable:
        """Return what ``to_json`` wrote; Corrupt where it is malformed."""
        try:
            told = object_of(value, "a mapping")
            version, rules = told["mapping"], list_of(told["rules"], "rules")
            if version == _VERSION:
                return cls(tuple(map(rule_of_json, rules)))
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"malformed mapping: {shown(error)}") from error
        raise CheckpointError(
            f"a mapping of version {shown(version)}; this dtckpt reads {_VERSION}. Upgrade dtckpt"
        )

    def to_bytes(self) -> bytes:
        """Return JSON text, a line for each rule; the same for equal tables."""
        rules = ",\n".join(json.dumps(rule_to_json(rule)) for rule in self.rules)
        return f'{{"mapping": {_VERSION}, "rules": [\n{rules}\n]}}\n'.encode()

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> MappingTable:
        """Return the table of a JSON text; Corrupt, naming ``where``, where it is malformed."""
        check_metadata_bytes(2 * len(text), where)
        try:
            return cls.from_json(parse_json(text, where))
        except Corrupt as error:
            raise Corrupt(f"{where}: {error}") from error


TensorMapping = MappingTable | Sequence[MappingRule]
"""What ``mapping=`` takes."""


def table_of(mapping: TensorMapping) -> MappingTable:
    """Return the table that an argument means."""
    return mapping if isinstance(mapping, MappingTable) else MappingTable(mapping)


def mapped_manifest(
    manifest: Manifest, mapping: TensorMapping | None, where: str, *, part: str = ""
) -> Manifest:
    """Return a checkpoint as it is seen through a mapping, if there is one."""
    return manifest if mapping is None else table_of(mapping).applied_to(manifest, where, part=part)


def with_stored_names(seen: Manifest) -> Manifest:
    """Return a mapped checkpoint as a manifest tells it: renamed tensors are ``stored_as``.

    They are tied to those alone that are there. What is made of others stays as it is.
    """
    first: dict[str, str] = {}
    for name, tensor in seen.tensors.items():
        if first.setdefault(tensor.stored_name, name) != name and name == tensor.stored_name:
            first[name] = name  # of tied tensors the one that has its own name still
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in seen.tensors.items():
        stored, kept = tensor.stored_name, first[tensor.stored_name]
        if tensor.recipe is None:
            same_as = None if name == kept else kept
            stored_as = None if stored == kept else stored
            tensor = tensor._replace(name=name, same_as=same_as, stored_as=stored_as)
        tensors[name] = tensor
    return replace(seen, tensors=tensors)


@contextmanager
def _naming(where: str, number: int, rule: MappingRule) -> Generator[None]:
    """Name a rule where it does not fit."""
    try:
        yield
    except LayoutMismatch as error:
        raise LayoutMismatch(
            f"{where}: rule {number} of the mapping, {shown(rule)}: {error}"
        ) from error


def tensor_leaves(manifest: Manifest, part: str) -> dict[str, str]:
    """Return the names of tensors by where they stand in a part.

    Without what ranks keep for themselves.
    """
    index = index_tree(manifest.tree)
    start = f"{part}/" if part else ""
    found: dict[str, str] = {}
    for leaf in index.leaves:
        tag = tag_of(index.nodes[leaf])
        is_own = any(component[:1] == "@" for component in leaf.split("/"))
        if tag in TENSORS and leaf.startswith(start) and not is_own:
            found[leaf[len(start) :]] = index.nodes[leaf][tag]
    return found


def _apply(rule: MappingRule, tensors: dict[str, Mapped], makers: dict[str, MappingRule]) -> None:
    """Change ``tensors`` as a rule says, and note what it has made."""
    changes = list(rule.changes(tensors))
    if not changes:
        source = next(iter(_sources(rule)))
        raise LayoutMismatch(f"no tensor fits{near_names(source, list(tensors))}")
    for change in changes:
        for name in change.taken:
            if tensors.pop(name, None) is None:
                raise LayoutMismatch(f"tensor {name!r} is taken twice")
            makers.pop(name, None)
    for change in changes:
        for name, mapped in change.made.items():
            if name in tensors:
                maker = makers.get(name)
                by = "is there already" if maker is None else f"was made by {shown(maker)}"
                raise LayoutMismatch(f"tensor {name!r} would be made, but {by}")
            tensors[name] = mapped
            makers[name] = rule


def _sources(rule: MappingRule) -> Iterator[str]:
    told = rule_to_json(rule)
    yield from told.get("sources", ()) or [told["source"]]
