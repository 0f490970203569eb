"""Loading the state of torch optimizers.

The checkpoint says which state there is, in which dtypes, and in which form (``state_form``): an
optimizer that has not begun needs no dummy step, and one that has gone on loses what it has gained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from dtckpt.errors import CheckpointError

from ..files.stored_tensor import StoredTensor
from ..state.names import key_component
from ..state.subclass_node import SUBCLASS, note_of
from ..state.tree import ABSENT, Node, TreeIndex, below, children, item_of, tag_of
from ..tensors.dtensors import is_dtensor
from ..tensors.materialising import Replaced
from ..tensors.new_subclasses import new_subclass
from ..tensors.subclasses import fits, has_subclass_shard, is_subclass
from .param_names import params_of
from .spread import load_owned, owned_part
from .state_form import (
    StateForm,
    are_of_one_form,
    empty_as_saved,
    is_whole,
    local_device,
    wrapped_as,
)

_PARAM_SHAPED_NAMES = (
    "acc_delta ax exp_avg exp_avg_sq exp_inf grad_avg max_exp_avg_sq momentum_buffer prev "
    "square_avg sum"
)
_OF_PARAM_SHAPE = frozenset(_PARAM_SHAPED_NAMES.split())
"""State that always has the shape of its parameter. The destination then gets that shape, so that
state of another model is found out; other state takes the shape that was saved."""
_FACTORS = frozenset({"row_var", "col_var"})
"""State of as many dims as its parameter, each of its size or 1."""
_FLAT = frozenset({"d", "prev_flat_grad"})
"""State of LBFGS over all parameters, which stands in that of the first one."""


def load_optimizer(
    optimizer: torch.optim.Optimizer, filled: dict[str, Any], replaced: Replaced
) -> None:
    """Hand an optimizer its state in the dtypes that were saved.

    ``load_state_dict`` casts state to the dtype of its parameter, which would round what mixed
    precision keeps in float32. Parameters that got their memory in this load take the place of
    those without.
    """
    owned = owned_part(optimizer)
    if owned is not None:
        optimizer, filled = owned, load_owned(optimizer, owned, filled)
    adopt_parameters(optimizer, replaced)
    optimizer.load_state_dict(filled)
    for index, param in enumerate(params_of(optimizer)):
        given = filled["state"].get(index)
        if given and param in optimizer.state:
            optimizer.state[param] = _as_saved(optimizer.state[param], given)


def adopt_parameters(optimizer: torch.optim.Optimizer, replaced: Replaced) -> None:
    """Give an optimizer the parameters that took the place of those without memory."""
    new = replaced.parameters
    if not any(id(param) in new for param in params_of(optimizer)):
        return
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(param), param) for param in group["params"]]
    for param in [param for param in optimizer.state if id(param) in new]:
        optimizer.state[new[id(param)]] = optimizer.state.pop(param)


def _as_saved(loaded: Any, given: Any) -> Any:
    """Return loaded state with the tensors that were given for those of another dtype.

    And with values as they were given, unless the optimizer has made something else of them.
    """
    if isinstance(given, torch.Tensor):
        differs = isinstance(loaded, torch.Tensor) and loaded.dtype != given.dtype
        if type(given) is not torch.Tensor and (is_subclass(given) or has_subclass_shard(given)):
            return given  # a dtype that it only shows, and copies may be of another one
        return given.detach().to(loaded.device) if differs else loaded
    if isinstance(given, Mapping) and isinstance(loaded, MutableMapping):
        for key, value in cast("Mapping[Any, Any]", given).items():
            if key in loaded:
                loaded[key] = _as_saved(loaded[key], value)
        return cast(Any, loaded)
    if type(loaded) is not type(given):
        return loaded  # a setting that the optimizer has made a tensor of
    if not isinstance(given, list | tuple):
        return given  # of strings load_state_dict makes others
    pairs = zip(cast("list[Any]", loaded), cast("list[Any]", given), strict=False)
    items = [_as_saved(one, other) for one, other in pairs]
    if isinstance(loaded, list):
        loaded[: len(items)] = items
        return cast(Any, loaded)
    return tuple(items) if len(items) == len(loaded) else loaded


def wrong_shapes(
    index: TreeIndex,
    stored: Mapping[str, StoredTensor],
    at: str,
    param: torch.Tensor,
    whose: str,
    *,
    in_doubt: bool,
) -> list[str]:
    """Return what of the saved state of a parameter cannot be that of one of its shape.

    One tensor of this shape is proof enough. Without it factors have to be factors of this shape,
    and if it is ``in_doubt`` whether the state is that of the parameter, other tensors have to have
    its sizes alone. ``whose`` says of which parameter all this is.
    """
    node = index.find(at)
    shape = tuple(param.shape)
    tensors = [
        (
            key,
            below(at, component),
            note_of(child).size if tag_of(child) == SUBCLASS else stored[child["tensor"]].shape,
        )
        for key, component, child in ([] if node is ABSENT else children(node))
        if tag_of(child) == SUBCLASS or (tag_of(child) == "tensor" and child["tensor"] in stored)
    ]
    if any(saved == shape for _, _, saved in tensors):
        return []
    sizes = {1, *shape, param.numel()}
    return [
        f"{name}: saved as {list(saved)}, which cannot be of {whose}, whose shape is {list(shape)}"
        for key, name, saved in tensors
        if (key in _FACTORS and not _is_factor(saved, shape))
        or (in_doubt and not sizes.issuperset(saved))
    ]


def _is_factor(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) == len(whole) and all(n in (1, m) for n, m in zip(shape, whole, strict=True))


def flat_state(index: TreeIndex, stored: Mapping[str, StoredTensor], at: str) -> int | None:
    """Return the size of the vectors over all parameters in what is saved for one of them."""
    node = index.find(at)
    if node is ABSENT or not children(node):
        return None
    for key, _, child in children(node):
        if key in _FLAT and tag_of(child) == "tensor" and child["tensor"] in stored:
            return math.prod(stored[child["tensor"]].shape)
    return 0


@dataclass(slots=True)
class FreshState:
    """Builds state of the saved form for parameters; only what is selected.

    What a parameter has already is filled where it has that form, and replaced elsewhere.
    """

    index: TreeIndex
    stored: Mapping[str, StoredTensor]
    is_selected: Callable[[str], bool]
    allow_pickle: bool
    problems: list[str] = field(default_factory=list[str])
    """Parameters of which only a part of the state would be there after the load."""
    _made: dict[int, tuple[str, torch.Tensor]] = field(
        default_factory=dict[int, tuple[str, torch.Tensor]]
    )

    def entry(
        self,
        existing: dict[Any, Any],
        at: str,
        param: torch.Tensor,
        saved_param: StoredTensor | None,
    ) -> dict[Any, Any]:
        """Return the state of a parameter, in which what is to be loaded has the saved form.

        What the checkpoint does not have is left out, unless it is not selected.
        """
        node = self.index.find(at)
        if node is ABSENT:
            return {} if self.is_selected(at) else existing
        form = StateForm.of(param, saved_param, self._tensors(at))
        built: dict[Any, Any] = {}
        left_out: list[str] = []
        for key, component, child in children(node):
            name, held = below(at, component), existing.get(key)
            is_leaf = tag_of(child) == "tensor"
            leaves = (name,) if is_leaf else self.index.leaves_of(name)
            if any(map(self.is_selected, leaves)):
                has_shape = key in _OF_PARAM_SHAPE
                built[key] = self._build(child, name, form, held, has_shape=has_shape)
            elif key in existing:
                built[key] = held
            else:
                left_out.append(name)
        if left_out and built:
            self.problems.append(
                f"{at}: the optimizer has no {left_out[0]} yet, which is not selected; select all "
                f"of {at} or nothing of it"
            )
        kept = {
            key: value
            for key, value in existing.items()
            if key not in built and not self.is_selected(below(at, _component(key)))
        }
        return kept | built

    def unfilled(self, destinations: Iterable[Any]) -> list[str]:
        """Return what is wrong where tensors that were made here are not among those filled."""
        if not self._made:
            return []
        filled = {id(value) for value in destinations}
        return [
            f"{name}: the optimizer has no such state yet, and the load would not fill it; select "
            "all of the state of a parameter and do not rename inside of it"
            for key, (name, _) in self._made.items()
            if key not in filled
        ]

    def _tensors(self, at: str) -> Iterator[StoredTensor]:
        """Yield all tensors of the saved state of a parameter."""
        for leaf in self.index.leaves_of(at):
            node = self.index.nodes[leaf]
            if tag_of(node) == "tensor" and node["tensor"] in self.stored:
                yield self.stored[node["tensor"]]

    def _build(
        self, node: Node, name: str, form: StateForm, held: Any, *, has_shape: bool = False
    ) -> Any:
        """Return a place for saved state; ``held`` is what is there, and stays where it fits.

        With ``has_shape`` it is of the shape of its parameter, whatever was saved.
        """
        tag = tag_of(node)
        if tag == "tensor" and node["tensor"] in self.stored:
            saved = self.stored[node["tensor"]]
            shape = tuple(form.param.shape) if has_shape else saved.shape
            if form.is_plain(held, saved, shape):
                return held  # nearly all, without memory for another one
            made = form.empty(saved, shape)
            if are_of_one_form(held, made):
                return held
            self._made[id(made)] = name, made
            return made
        if tag == SUBCLASS:
            return self._subclass(node, name, form, held, has_shape=has_shape)
        items = {
            key: self._build(child, below(name, component), form, item_of(held, key))
            for key, component, child in children(node)
        }
        if tag in ("list", "tuple"):
            return list(items.values()) if tag == "list" else tuple(items.values())
        return items or None

    def _subclass(
        self, node: Node, name: str, form: StateForm, held: Any, *, has_shape: bool
    ) -> Any:
        """Return a tensor that consists of others, or what is there where that is alike."""
        param, note = form.param, note_of(node)
        if has_shape and note.size != tuple(param.shape):
            self.problems.append(
                f"{name}: saved as {list(note.size)}, but the parameter has the shape "
                f"{list(param.shape)}"
            )
            return None
        wrap = None
        if is_dtensor(param) and form.was_plain is not False:
            if not is_whole(param):
                self.problems.append(
                    f"{name}: a {note.text} of the whole parameter was saved, and this parameter "
                    "is sharded. Nothing can cut it: load it where each rank has the whole "
                    "parameter, or leave it out by select= and let the optimizer begin anew"
                )
                return None
            wrap = partial(wrapped_as, param)
        elif fits(node, held, self._is_alike):
            return held

        device = local_device(param)

        def empty(stored: str) -> torch.Tensor:
            return empty_as_saved(self.stored[stored], device)

        try:
            made = new_subclass(node, name, empty, allow_pickle=self.allow_pickle, wrap=wrap)
        except CheckpointError as error:
            self.problems.append(str(error))
            return None
        self._made |= {id(tensor): (stored, tensor) for stored, tensor in made.plain()}
        return made

    def _is_alike(self, stored: str, tensor: torch.Tensor) -> bool:
        saved = self.stored.get(stored)
        return (
            saved is not None
            and tuple(tensor.shape) == saved.shape
            and tensor.dtype == getattr(torch, saved.dtype.torch_name)
        )


def _component(key: Any) -> str:
    return key_component(key) if type(key) in (str, int) else str(key)
