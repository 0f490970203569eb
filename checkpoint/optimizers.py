"""Loading the state of torch optimizers.

A fresh optimizer has no state to load into. Its form is known from the checkpoint: what was saved
for a parameter and has the parameter's shape lies as the parameter does now; the rest (step
counters) is small and plain. No dummy step is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .plan import StoredTensor
from .tree import Node, children, tag_of

_OF_PARAM_SHAPE = frozenset(
    {
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "sum",
    }
)
"""State that always has the shape of its parameter. The destination then gets that shape, so that
state of another model is found out; other state takes the shape that was saved."""


def optimizer_template(
    optimizer: torch.optim.Optimizer, node: Node, stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Return the optimizer's state dict, with tensors to load into where it has no state yet."""
    template = optimizer.state_dict()
    saved = {key: child for key, _, child in children(node)}.get("state")
    params = _params(optimizer)
    for index, _, entry in children(saved):
        if index in params:
            like = _Like(params[int(index)], stored)
            template["state"][index] = like.entry(template["state"].get(index, {}), entry)
    return template


def load_optimizer(optimizer: torch.optim.Optimizer, filled: dict[str, Any]) -> None:
    """Hand an optimizer its state in the dtypes that were saved.

    ``load_state_dict`` casts state to the dtype of its parameter, which would round what mixed
    precision keeps in float32.
    """
    optimizer.load_state_dict(filled)
    for index, param in _params(optimizer).items():
        state = optimizer.state.get(param, {})
        for key, value in filled["state"].get(index, {}).items():
            loaded = state.get(key)
            both = isinstance(loaded, torch.Tensor) and isinstance(value, torch.Tensor)
            if both and loaded.dtype != value.dtype:
                state[key] = value.detach().to(loaded.device)


def _params(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


class _Like:
    """Builds a state of the saved form for one parameter."""

    def __init__(self, param: torch.Tensor, stored: Mapping[str, StoredTensor]) -> None:
        self.param = param
        self.stored = stored

    def entry(self, existing: dict[Any, Any], node: Node) -> dict[Any, Any]:
        """Return the state of a parameter: its tensors where it has them, new ones elsewhere."""
        built: dict[Any, Any] = {}
        for key, _, child in children(node):
            held, is_tensor = existing.get(key), tag_of(child) == "tensor"
            if is_tensor and isinstance(held, torch.Tensor):
                built[key] = held
            elif is_tensor and key in _OF_PARAM_SHAPE and child["tensor"] in self.stored:
                dtype = getattr(torch, self.stored[child["tensor"]].dtype.torch_name)
                built[key] = torch.empty_like(self.param, dtype=dtype, requires_grad=False)
            else:
                built[key] = self.build(child)
        return existing | built

    def build(self, node: Node) -> Any:
        tag = tag_of(node)
        if tag == "tensor" and node["tensor"] in self.stored:
            return self.tensor(self.stored[node["tensor"]])
        items = {key: self.build(child) for key, _, child in children(node)}
        if tag in ("list", "tuple"):
            return list(items.values()) if tag == "list" else tuple(items.values())
        return items or None

    def tensor(self, saved: StoredTensor) -> torch.Tensor:
        """Return a tensor for a saved one: laid out as the parameter if it has its shape."""
        dtype = getattr(torch, saved.dtype.torch_name)
        if saved.shape == tuple(self.param.shape):
            return torch.empty_like(self.param, dtype=dtype, requires_grad=False)
        return torch.empty(saved.shape, dtype=dtype, device="cpu")
