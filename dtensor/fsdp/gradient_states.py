"""Gradients as a state dict: for checkpoints in the midst of an accumulation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtckpt.errors import LayoutMismatch

from ..dtensor import DTensor
from ..gradients import reduce_gradients
from .held import grad_dtype_of
from .state import put_back, states_below


def gradient_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model by the names of their parameters, reduced; every rank calls.

    What waits in modules that ``fully_shard`` treated is reduced before, by two collectives at most
    for each of them, and what ``partial_gradients()`` left, by one for each group of ranks. All lie
    as their parameters, so that saving them sends nothing, and any mesh can load them. Passes that
    follow add to them. Parameters that have none, and wait for none, are left out.
    """
    put_back(module)
    for state in states_below(module):
        state.unit.reduce_pending(anyway=True)
    named = dict(module.named_parameters())
    reduce_gradients(named.values())
    return {name: one.grad for name, one in named.items() if one.grad is not None}


def load_gradient_state_dict(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Let the parameters of a model have these gradients, and no others; nothing waits any more.

    DTensors are redistributed to where the parameters lie. Backward passes that follow add to
    them. Raises LayoutMismatch for names or shapes that the parameters do not have, and for plain
    gradients of distributed ones or the reverse, before anything is changed.
    """
    put_back(module)
    named = dict(module.named_parameters())
    unknown = sorted(set(gradients) - set(named))
    if unknown:
        raise LayoutMismatch(f"gradients of parameters that the model does not have: {unknown}")
    for name, grad in gradients.items():
        if grad.shape != named[name].shape:
            raise LayoutMismatch(
                f"gradient of {name!r}: expected shape {list(named[name].shape)}, got "
                f"{list(grad.shape)}"
            )
        if isinstance(grad, DTensor) != isinstance(named[name], DTensor):
            raise LayoutMismatch(
                f"gradient of {name!r}: expected a {type(named[name].data).__name__} as the "
                f"parameter is, got a {type(grad).__name__}; distribute_tensor(gradient, mesh) "
                "makes a DTensor of a whole one"
            )
    for state in states_below(module):
        state.unit.gradients.forget()
    with torch.no_grad():
        for name, one in named.items():
            grad = gradients.get(name)
            if isinstance(one, DTensor) and isinstance(grad, DTensor):
                grad = grad.redistribute(one.device_mesh, one.placements)
            one.grad = None if grad is None else grad.to(grad_dtype_of(one) or grad.dtype)
