"""``distribute_module``: a module whose parameters and buffers are distributed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from .dtensor import distribute_tensor
from .mesh.device_mesh import DeviceMesh
from .mesh.resolving import AnyMesh, resolve_mesh
from .tensor.compilers import opaque
from .tensor.wrapper import Wrapper

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
HookFn = Callable[[nn.Module, Any, DeviceMesh], Any]
ShortHookFn = Callable[[Any, DeviceMesh], Any]


@opaque
def distribute_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: HookFn | ShortHookFn | None = None,
    output_fn: HookFn | ShortHookFn | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module distributed tensors, in place; return it.

    ``partition_fn(name, submodule, mesh)`` is called for every submodule and may replace what it
    has by distributed tensors; all that is left plain is replicated, with the values of the first
    rank. Tied parameters stay tied: what is made of one of them takes the place of all.
    ``input_fn(module, inputs, mesh)`` and ``output_fn(module, outputs, mesh)`` run before and
    after the forward pass of ``module``, and what they return, if anything, replaces inputs and
    outputs. An older form without the module, ``input_fn(inputs, mesh)``, is taken with a
    FutureWarning.

    Raises PlacementError where no mesh is given or active, and where tied parameters were laid
    out in different ways.
    """
    mesh = resolve_mesh(device_mesh)
    before = list(slots(module))
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    keep_tied("distribute_module", before)
    replicas: dict[int, Tensor] = {}
    for owner, name, tensor in list(slots(module)):
        if not isinstance(tensor, Wrapper):
            if id(tensor) not in replicas:
                replicas[id(tensor)] = _replicated(tensor, mesh)
            setattr(owner, name, replicas[id(tensor)])
    if input_fn is not None:
        before_it = _of_three(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda m, inputs: before_it(m, inputs, mesh))
    if output_fn is not None:
        after_it = _of_three(output_fn, "output_fn")
        module.register_forward_hook(lambda m, _, outputs: after_it(m, outputs, mesh))
    return module


def _of_three(function: Callable[..., Any], name: str) -> HookFn:
    """Return a hook that takes the module, too; a FutureWarning tells of the other form."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(function).parameters.values()
    required = [p for p in parameters if p.kind in positional and p.default is Parameter.empty]
    takes_any = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    if len(required) == 2 and not takes_any:
        warnings.warn(
            f"Deprecating hooks of two arguments, as torch does: let {name} take the module first",
            FutureWarning,
            stacklevel=4,
        )
        return lambda module, values, mesh: function(values, mesh)
    return function


def slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield every place of a parameter or buffer, those of tied ones too."""
    for submodule in module.modules():
        for name, tensor in submodule.named_parameters(recurse=False, remove_duplicate=False):
            yield submodule, name, tensor
        for name, tensor in submodule.named_buffers(recurse=False, remove_duplicate=False):
            yield submodule, name, tensor


def keep_tied(caller: str, before: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Put what was made of a tensor in all the places where that was."""
    made: dict[int, tuple[str, Wrapper]] = {}
    for owner, name, tensor in before:
        now = getattr(owner, name, None)
        if now is tensor or not isinstance(now, Wrapper):
            continue
        other, chosen = made.setdefault(id(tensor), (name, now))
        if chosen.spec.layout != now.spec.layout:
            raise PlacementError(
                f"{caller}: one tied parameter became {chosen.spec} as {other!r} and "
                f"{now.spec} as {name!r}; give both the same placements"
            )
    for owner, name, tensor in before:
        if id(tensor) in made and getattr(owner, name, None) is not None:
            setattr(owner, name, made[id(tensor)][1])


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    made = distribute_tensor(tensor, mesh)
    if not isinstance(tensor, nn.Parameter):
        return made
    return nn.Parameter(made.detach(), requires_grad=tensor.requires_grad)
