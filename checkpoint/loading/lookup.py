"""The checkpoint as a walk of the state looks things up in it: names, and what is selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..state.packing import as_bytes, unpack
from ..state.renaming import Renaming
from ..state.selecting import Selection, selection_of
from ..state.tree import (
    PACKED,
    MakeSubclass,
    Node,
    TreeIndex,
    index_tree,
    packed_name,
    plain_node,
    unflatten,
)
from ..tensors.new_subclasses import made_of
from .options import LoadOptions


@dataclass(kw_only=True)
class Lookup:
    """Where names in the state are found in a checkpoint, and whether that part is to be loaded."""

    manifest: Manifest
    options: LoadOptions
    read: Callable[[StoredTensor], Any]
    """Reads a stored tensor whole, of which the bytes of packed values are told."""
    index: TreeIndex = field(init=False)
    stored: Mapping[str, StoredTensor] = field(init=False)
    selection: Selection | None = field(init=False)
    renaming: Renaming | None = field(init=False)
    place: tuple[str, str] | None = field(init=False, default=None)
    """A name in the state, and where in the checkpoint this and all below it is found."""
    taken: set[str] = field(init=False, default_factory=set[str])
    """Leaves of the checkpoint that the state has a place for."""
    packed: dict[str, Node] = field(init=False)
    """Leaves that are packed values and have not been expanded, by name."""
    expanded: set[str] = field(init=False, default_factory=set[str])
    """Leaves of the checkpoint in whose place the index has the nodes of each value."""
    bytes_read: dict[str, Any] = field(init=False, default_factory=dict[str, Any])
    """Bytes of packed values that have been read, by the name under which they are stored."""

    def __post_init__(self) -> None:
        rename = self.options.rename
        self.index = index_tree(self.manifest.tree)
        self.stored = self.manifest.tensors
        self.selection = selection_of(self.options.select)
        self.renaming = None if rename is None else Renaming(rename)
        nodes = self.index.nodes
        found = ((leaf, nodes[leaf]) for leaf in self.index.leaves)
        self.packed = {leaf: node for leaf, node in found if type(node) is dict and PACKED in node}
        if self.selection is not None:
            for leaf in [*self.packed]:
                if self.selection.selects_within(leaf):
                    self.expand(leaf)

    def packed_value(self, node: Node) -> Any:
        """Return a new value of a packed node."""
        name = packed_name(node)
        return unpack(self.bytes_of(name), name)

    def bytes_of(self, name: str) -> bytes | memoryview:
        """Return the bytes of a packed value, which are read now, before anything changes.

        Raises Corrupt and StorageError as any read does.
        """
        if name not in self.bytes_read:
            self.bytes_read[name] = as_bytes(self.read(self.stored[name]))
        return self.bytes_read[name]

    def expand(self, at: str) -> None:
        """Put the nodes of each value in the place of a packed one."""
        value = self.packed_value(self.packed.pop(at))
        self.expanded.add(at)
        self.index.expand(at, plain_node(value, at))

    def leaf_names(self) -> Iterator[str]:
        """Yield the names of all leaves, of which some are expanded."""
        for leaf in self.index.leaves:
            if leaf in self.expanded:
                yield from self.index.leaves_of(leaf)
            else:
                yield leaf

    def is_unexpected(self, leaf: str) -> bool:
        """Whether a leaf, or a part of it, is selected and the state has no place for it."""
        if leaf not in self.expanded:
            return leaf not in self.taken and self.is_selected(leaf)
        parts = self.index.leaves_of(leaf)
        return any(name not in self.taken and self.is_selected(name) for name in parts)

    def value_of(
        self,
        node: Node,
        tensor: Callable[[str, str], Any],
        name: str,
        make: MakeSubclass | None = None,
    ) -> Any:
        """Return the value of a node; ``tensor`` supplies its tensors, but not packed values.

        ``make`` makes tensor subclasses, by default of the classes that they were.
        """

        def supply(stored: str, tag: str) -> Any:
            return self.bytes_of(stored) if tag == PACKED else tensor(stored, tag)

        allow_pickle = self.options.allow_pickle
        make = make or partial(made_of, allow_pickle=allow_pickle)
        return unflatten(node, supply, allow_pickle=allow_pickle, path=(name,), make=make)

    def at(self, name: str) -> str:
        """Return the name in the checkpoint of a name in the state."""
        renamed = name if self.renaming is None else self.renaming(name)
        if self.place is None:
            return renamed
        top, place = self.place
        if name == top:
            return place
        start = f"{top if self.renaming is None else self.renaming(top)}/"
        return f"{place}/{renamed[len(start) :]}" if renamed.startswith(start) else renamed

    def is_selected(self, at: str) -> bool:
        return self.selection is None or at in self.selection

    def cannot_reach(self, name: str) -> bool:
        """Whether it is plain that nothing at or below a name in the state is selected."""
        if self.selection is None or self.renaming is not None:
            return False
        return not self.selection.may_reach(name)

    def selects_below(self, at: str) -> bool:
        """Whether some leaf at or below a node is selected; not so if there is none."""
        if self.selection is None or at not in self.index.nodes:
            return self.selection is None
        return any(map(self.is_selected, self.index.leaves_of(at)))

    def takes_below(self, at: str) -> bool:
        """Whether the state has had a place so far for some leaf at or below a node."""
        return any(leaf in self.taken for leaf in self.index.leaves_of(at))
