"""Matching a state dict that is to be filled with the tree of a checkpoint.

The template is walked; every name in it is looked up in the tree. Tensors become destinations,
other leaves take the saved value. Nothing is changed while matching: the result is a function that
rebuilds the state once every byte has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from dtckpt.errors import LayoutMismatch

from ..files.stored_tensor import StoredTensor
from ..ranks.together import Ranks
from ..state.renaming import Renaming
from ..state.selecting import Selection
from ..state.stateful import Stateful, is_stateful
from ..state.tree import (
    Node,
    dict_tag,
)
from ..state.tree_index import index_tree
from .match import Match, Rebuild
from .optimizer_matching import match_optimizer
from .walk import Walk


def match(
    template: Mapping[Any, Any] | Stateful,
    tree: Node,
    stored: Mapping[str, StoredTensor],
    *,
    ranks: Ranks,
    tensor_tag: Callable[[object], str | None],
    allow_pickle: bool,
    where: str,
    selection: Selection | None = None,
    renaming: Renaming | None = None,
) -> tuple[Match, Rebuild]:
    """Walk ``template`` beside ``tree`` and return the match and the function that finishes it."""
    if dict_tag(template) is None and not is_stateful(template):
        raise LayoutMismatch(
            "a state to load into is a dict, or an object with state_dict() and load_state_dict(); "
            f"got {type(template).__name__}. load changes it in place, so wrap other things in a "
            "dict"
        )
    index = index_tree(tree)
    if selection is not None:
        selection.check(index.leaves, where)
    walk = Walk(
        index=index,
        stored=stored,
        ranks=ranks,
        tensor_tag=tensor_tag,
        allow_pickle=allow_pickle,
        selection=selection,
        renaming=renaming,
        match_optimizer=match_optimizer,
    )
    rebuild = walk.run(template)
    if rebuild is not None and not isinstance(template, MutableMapping):
        raise LayoutMismatch(
            f"{where}: values were saved ({', '.join(walk.found.values[:3])}), and a "
            f"{type(template).__name__} cannot take them in; give a dict to load into"
        )
    return walk.finish(), rebuild or (lambda: template)
