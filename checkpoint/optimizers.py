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


def optimizer_template(
    optimizer: torch.optim.Optimizer, node: Node, stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Return the optimizer's state dict, with tensors to load into where it has no state yet."""
    template = optimizer.state_dict()
    saved = {key: child for key, _, child in children(node)}.get("state")
    params = _params(optimizer)
    # LBFGS keeps flat vectors over all parameters, which are of no parameter's shape.
    per_param = not isinstance(optimizer, torch.optim.LBFGS)
    for index, _, entry in children(saved):
        if index in params:
            like = _Like(params[int(index)], stored, per_param=per_param)
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
            if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                state[key] = value.detach().to(loaded.device)


def _params(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


class _Like:
    """Builds a state of the saved form for one parameter."""

    def __init__(
        self, param: torch.Tensor, stored: Mapping[str, StoredTensor], *, per_param: bool
    ) -> None:
        self.param = param
        self.stored = stored
        self.per_param = per_param

    def entry(self, existing: dict[str, Any], node: Node) -> dict[str, Any]:
        """Return the state of a parameter: its tensors where it has them, new ones elsewhere."""
        built: dict[str, Any] = {}
        for key, _, child in children(node):
            held = existing.get(str(key))
            built[str(key)] = held if isinstance(held, torch.Tensor) else self.build(child)
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
        """Return a tensor for a saved one.

        State of as many dims as the parameter, each of its size or of 1 (factored statistics),
        belongs to the parameter. With other sizes it belongs to another one: the tensor then has
        the parameter's shape, so that the load finds the mismatch.
        """
        dtype = getattr(torch, saved.dtype.torch_name)
        shape = tuple(self.param.shape)
        foreign = len(saved.shape) == len(shape) and any(
            n not in (1, m) for n, m in zip(saved.shape, shape, strict=True)
        )
        if saved.shape == shape or (self.per_param and foreign):
            return torch.empty_like(self.param, dtype=dtype, requires_grad=False)
        return torch.empty(saved.shape, dtype=dtype, device="cpu")
