"""The checkpoint as a walk of the state looks things up in it: names, and what is selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..state.renaming import Renaming
from ..state.selecting import Selection, selection_of
from ..state.tree import TreeIndex, index_tree
from .options import LoadOptions


@dataclass(kw_only=True)
class Lookup:
    """Where names in the state are found in a checkpoint, and whether that part is to be loaded."""

    manifest: Manifest
    options: LoadOptions
    index: TreeIndex = field(init=False)
    stored: Mapping[str, StoredTensor] = field(init=False)
    selection: Selection | None = field(init=False)
    renaming: Renaming | None = field(init=False)
    place: tuple[str, str] | None = field(init=False, default=None)
    """A name in the state, and where in the checkpoint this and all below it is found."""
    taken: set[str] = field(init=False, default_factory=set[str])
    """Leaves of the checkpoint that the state has a place for."""

    def __post_init__(self) -> None:
        rename = self.options.rename
        self.index = index_tree(self.manifest.tree)
        self.stored = self.manifest.tensors
        self.selection = selection_of(self.options.select)
        self.renaming = None if rename is None else Renaming(rename)

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
