"""Matching a state dict that is to be filled with the tree of a checkpoint.

The template is walked; every name in it is looked up in the tree. Tensors become destinations,
other leaves take the saved value. Nothing is changed while matching: what is found has a
function that rebuilds the state once every byte has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from dtckpt.errors import LayoutMismatch

from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..ranks.together import Ranks
from ..state.tree import Stateful, dict_tag, is_stateful
from .coordinate_matching import match_coordinate
from .match import Match
from .optimizer_matching import match_optimizer
from .options import LoadOptions
from .walk import Walk


def match(
    template: Mapping[Any, Any] | Stateful,
    manifest: Manifest,
    *,
    options: LoadOptions,
    ranks: Ranks,
    where: str,
    read: Callable[[StoredTensor], Any],
) -> Match:
    """Walk ``template`` beside the tree of a checkpoint and return what was found.

    ``where`` is the checkpoint's URL. ``read`` gives the bytes of packed values. Raises
    LayoutMismatch for what can be no template, and where ``select`` or ``rename`` cannot be meant.
    """
    if dict_tag(template) is None and not is_stateful(template):
        raise LayoutMismatch(
            "a state to load into is a dict, or an object with state_dict() and load_state_dict(); "
            f"got {type(template).__name__}. load changes it in place, so wrap other things in a "
            "dict"
        )
    walk = Walk(
        manifest=manifest,
        options=options,
        ranks=ranks,
        read=read,
        match_optimizer=match_optimizer,
        match_coordinate=match_coordinate,
    )
    if walk.selection is not None:
        walk.selection.check(list(walk.leaf_names()), where)
    rebuild = walk.run(template)
    if rebuild is not None and not isinstance(template, MutableMapping):
        raise LayoutMismatch(
            f"{where}: values were saved ({', '.join(walk.found.values[:3])}), and a "
            f"{type(template).__name__} cannot take them in; give a dict to load into"
        )
    found = walk.finish()
    if rebuild is not None:
        found.rebuild = rebuild
    return found
