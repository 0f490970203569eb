"""Where to load the state of an optimizer that has not made a step yet.

A fresh torch optimizer has no state to load into. Its shape is known from the checkpoint: what
was saved for a parameter and has the parameter's shape lies as the parameter does now; the rest
(step counters) is small and plain. No dummy step is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .plan import StoredTensor
from .tree import Node, children, tag_of


def optimizer_template(
    value: object, node: Node, stored: Mapping[str, StoredTensor]
) -> dict[str, Any] | None:
    """Return a state dict with tensors for all saved state, or None where none is needed.

    ``value`` is any object; anything but a torch optimizer without state needs none.
    """
    if not isinstance(value, torch.optim.Optimizer) or value.state:
        return None
    template = value.state_dict()
    saved = {key: child for key, _, child in children(node)}.get("state")
    params = dict(enumerate(p for group in value.param_groups for p in group["params"]))
    for index, _, entry in children(saved):
        if index in params:
            template["state"][index] = {
                key: _like(params[index], child, stored) for key, _, child in children(entry)
            }
    return template


def _like(param: torch.Tensor, node: Node, stored: Mapping[str, StoredTensor]) -> Any:
    if tag_of(node) != "tensor" or node["tensor"] not in stored:
        return None
    tensor = stored[node["tensor"]]
    dtype = getattr(torch, tensor.dtype.torch_name)
    if tensor.shape == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    return torch.empty(tensor.shape, dtype=dtype)
