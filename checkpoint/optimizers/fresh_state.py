"""Loading the state of torch optimizers.

A fresh optimizer has no state to load into. Its form is known from the checkpoint: what was saved
for a parameter and has the parameter's shape lies as the parameter does now; the rest (step
counters) is small and plain. No dummy step is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files.stored_tensor import StoredTensor
from ..state.tree import ABSENT, Node, TreeIndex, below, children, tag_of
from ..tensors.materialising import Replaced
from .param_names import params_of
from .spread import load_owned, owned_part

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
    if replaced.parameters:
        for group in optimizer.param_groups:
            group["params"] = [replaced.parameters.get(id(p), p) for p in group["params"]]
    optimizer.load_state_dict(filled)
    for index, param in enumerate(params_of(optimizer)):
        state = optimizer.state.get(param, {})
        for key, value in filled["state"].get(index, {}).items():
            loaded = state.get(key)
            both = isinstance(loaded, torch.Tensor) and isinstance(value, torch.Tensor)
            if both and loaded.dtype != value.dtype:
                state[key] = value.detach().to(loaded.device)


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
        (key, below(at, component), stored[child["tensor"]].shape)
        for key, component, child in ([] if node is ABSENT else children(node))
        if tag_of(child) == "tensor" and child["tensor"] in stored
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
    """Builds state of the saved form for parameters that have none; only what is selected."""

    index: TreeIndex
    stored: Mapping[str, StoredTensor]
    is_selected: Callable[[str], bool]
    problems: list[str] = field(default_factory=list[str])
    """Parameters of which only a part of the state would be there after the load."""
    _made: dict[int, tuple[str, torch.Tensor]] = field(
        default_factory=dict[int, tuple[str, torch.Tensor]]
    )

    def entry(self, existing: dict[Any, Any], at: str, param: torch.Tensor) -> dict[Any, Any]:
        """Return the state of a parameter: its tensors where it has them, new ones elsewhere."""
        node = self.index.find(at)
        if node is ABSENT:
            return existing
        built: dict[Any, Any] = {}
        left_out: list[str] = []
        for key, component, child in children(node):
            name, held = below(at, component), existing.get(key)
            is_tensor = tag_of(child) == "tensor"
            if is_tensor and isinstance(held, torch.Tensor):
                built[key] = held
            elif not any(map(self.is_selected, self.index.leaves_of(name))):
                if key in existing:
                    built[key] = held
                else:
                    left_out.append(name)
            elif is_tensor and key in _OF_PARAM_SHAPE and child["tensor"] in self.stored:
                dtype = getattr(torch, self.stored[child["tensor"]].dtype.torch_name)
                built[key] = self._note(name, _empty_like(param, dtype))
            else:
                built[key] = self._build(child, name, param)
        if left_out and built:
            self.problems.append(
                f"{at}: the optimizer has no {left_out[0]} yet, which is not selected; select all "
                f"of {at} or nothing of it"
            )
        return existing | built

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

    def _note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._made[id(tensor)] = name, tensor
        return tensor

    def _build(self, node: Node, name: str, param: torch.Tensor) -> Any:
        tag = tag_of(node)
        if tag == "tensor" and node["tensor"] in self.stored:
            return self._note(name, self._tensor(self.stored[node["tensor"]], param))
        items = {
            key: self._build(child, below(name, component), param)
            for key, component, child in children(node)
        }
        if tag in ("list", "tuple"):
            return list(items.values()) if tag == "list" else tuple(items.values())
        return items or None

    @staticmethod
    def _tensor(saved: StoredTensor, param: torch.Tensor) -> torch.Tensor:
        """Return a tensor for a saved one: laid out as the parameter if it has its shape.

        Beside a distributed parameter others are replicas on its mesh, which its optimizer computes
        with, and step counters are plain.
        """
        dtype = getattr(torch, saved.dtype.torch_name)
        if saved.shape == tuple(param.shape):
            return _empty_like(param, dtype)
        if saved.shape and hasattr(param, "placements"):
            return param.new_empty(saved.shape, dtype=dtype)
        return torch.empty(saved.shape, dtype=dtype, device="cpu")


def _empty_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(param, dtype=dtype, requires_grad=False)
