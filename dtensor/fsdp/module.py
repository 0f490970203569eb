"""What a sharded module is: its hooks, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtckpt.errors import PlacementError

from ..torch_private import flatten_tree, in_backward, when_backward_ends
from .unit import Unit


class State:
    """A sharded module while it runs."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self.unit = unit
        self.is_root: bool | None = None
        """None before the first forward pass."""
        self.below: list[State] = []
        """All states of the root and in it; of the root only."""
        self.saving: list[saved_tensors_hooks | None] = []
        """One for each forward pass that runs, the innermost last."""
        self.is_in_backward = False
        self.was_asked_for = False
        """Whether the user has gathered the parameters for the next forward pass."""
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        # Also where the forward pass raises: the sharded parameters have to be back.
        module.register_forward_hook(self.after_forward, always_call=True)

        def note(part: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            self.after_state_dict(part, state_dict, prefix)

        module.register_state_dict_post_hook(note)  # a function: torch marks it

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make the parameters whole, and cast the inputs."""
        if self.is_root is None:
            self._become_root(module)
        if self.is_root and not in_backward():
            for state in self.below:
                if state.is_in_backward:  # which an exception has ended
                    state.end_unit()
        unit = self.unit
        is_inner = bool(self.saving) or self.is_in_backward
        self.saving.append(None)  # also where what follows raises: ``after_forward`` is called
        keeps = self.was_asked_for or not unit.reshards_after_backward
        unit.gather(anew=not (keeps or is_inner))
        self.was_asked_for = False
        if not is_inner:
            unit.show(when_reduced=self.end_unit)
        self.saving[-1] = hooks = unit.saving()
        hooks.__enter__()
        wanted = unit.precision.param_dtype
        if wanted is None or not unit.precision.cast_forward_inputs:
            return None
        leaves, rebuild = flatten_tree((args, kwargs))
        cast_leaves = [_cast(leaf, wanted) for leaf in leaves]
        if all(new is old for new, old in zip(cast_leaves, leaves, strict=True)):
            return None  # a list that the module is to change stays the caller's
        return rebuild(cast_leaves)

    def after_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Put the sharded parameters into a state dict that was asked for while they are whole."""
        if not self.unit.shown:
            return
        names = {id(part): name for name, part in module.named_modules()}
        for one in self.unit.held:
            for part, own in one.places:
                outer = names[id(part)]
                name = f"{prefix}{outer}.{own}" if outer else prefix + own
                if name in state_dict:
                    state_dict[name] = one.parameter.detach()

    def _become_root(self, module: nn.Module) -> None:
        below = list(states_below(module))
        for state in below:
            state.is_root, state.below = False, []
        self.is_root, self.below = True, below

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the sharded parameters back; the backward pass begins with the output."""
        del module, args
        unit = self.unit
        hooks = self.saving.pop() if self.saving else None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if self.saving:
            return output
        leaves, rebuild = flatten_tree(output)
        changed = list(leaves)
        wanted = unit.precision.output_dtype
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            made = leaf if wanted is None else _cast(leaf, wanted)
            if made.requires_grad and torch.is_grad_enabled():
                made.register_hook(self.before_backward)
            changed[number] = made
        # A forward pass within a backward one is made anew for that, as by checkpointing.
        if not self.is_in_backward:
            unit.hide()
            is_root = bool(self.is_root)
            if unit.reshards_after_forward(is_root=is_root) or not torch.is_grad_enabled():
                unit.free()
        is_same = all(new is old for new, old in zip(changed, leaves, strict=True))
        return output if is_same else rebuild(changed)

    def before_backward(self, grad: Tensor) -> None:
        """Make the parameters whole again; ``grad`` is that of some output."""
        del grad
        if self.is_in_backward:
            return
        self.unit.gather()
        with torch.enable_grad():  # what is made anew is to save what was saved before
            self.unit.show()
        self.is_in_backward = True
        when_backward_ends(self.end_backward)

    def end_unit(self) -> None:
        """Put the sharded parameters back, and free the whole ones, once all gradients have come.

        Whoever still needs one gathers them again.
        """
        if self.is_in_backward:
            self.is_in_backward = False
            self.unit.hide()
        if self.unit.reshards_after_backward:
            self.unit.free()

    def end_backward(self) -> None:
        """End a backward pass; the root also reduces what still waits in all units."""
        self.end_unit()
        for state in self.below:
            state.reduce_what_waits()

    def reduce_what_waits(self) -> None:
        """Reduce gradients of earlier passes that no parameter of this pass took along."""
        unit = self.unit
        if not unit.reduces or all(one.waiting is None for one in unit.held):
            return
        with torch.no_grad():
            grads = unit.reduced([None] * len(unit.held))
            for one, grad in zip(unit.held, grads, strict=True):
                if grad is not None:
                    before = one.parameter.grad
                    one.parameter.grad = grad if before is None else before + grad


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value


_STATES: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def state_of(module: nn.Module) -> State | None:
    """Return the state of a sharded module; None for others."""
    return _STATES.get(module)


def set_state(module: nn.Module, state: State) -> None:
    """Let a module be a sharded one."""
    _STATES[module] = state


def states_below(module: nn.Module) -> Iterator[State]:
    """Yield the states of a module and of all sharded ones in it."""
    for part in module.modules():
        found = _STATES.get(part)
        if found is not None:
            yield found


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module have its parameters whole, as ``forward`` has them.

    Nothing is done to a module that is not sharded. Raises PlacementError where there is no such
    method.
    """
    state = state_of(module)
    if state is None:
        return
    method: Any = getattr(module, method_name, None)
    if not callable(method):
        raise PlacementError(f"a {type(module).__name__} has no method {method_name!r}")

    @wraps(method)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = state.before_forward(module, args, kwargs) or (args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            state.after_forward(module, args, None)
            raise
        return state.after_forward(module, args, output)

    setattr(module, method_name, sharded)


class UnshardHandle:
    """What ``FSDPModule.unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are whole."""
        self._unit.gather()


class FSDPModule:
    """What ``fully_shard`` makes of a module: its class is a subclass of both."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a module of the class that was sharded, without being sharded itself."""
        original = cls.__mro__[2]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PlacementError(
            "a sharded module is not copied: its parameters are gathered by hooks of its own. Copy "
            "it before fully_shard, or load its state dict into another one"
        )

    def _states(self, *, recurse: bool) -> list[State]:
        module = cast(nn.Module, self)
        return list(states_below(module)) if recurse else [_STATES[module]]

    def unshard(self, async_op: bool = False, *, recurse: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, and with ``recurse`` of those in it, now."""
        for state in self._states(recurse=recurse):
            state.unit.gather(anew=not state.was_asked_for)
            state.was_asked_for = True
        return UnshardHandle(_STATES[cast(nn.Module, self)].unit) if async_op else None

    def reshard(self, *, recurse: bool = False) -> None:
        """Free the whole parameters of this module, and with ``recurse`` of those in it."""
        for state in self._states(recurse=recurse):
            state.unit.free()
            state.was_asked_for = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that wait for their reduction, too.

        The ``zero_grad`` of an optimizer does not know of these.
        """
        for state in self._states(recurse=True):
            for one in state.unit.held:
                one.waiting = None
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether a backward pass reduces gradients; else they are added up on each rank.

        What waits is reduced with the gradients of the next pass that does.
        """
        for state in self._states(recurse=recurse):
            state.unit.reduces = requires_gradient_sync

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether whole parameters are freed after the backward pass."""
        for state in self._states(recurse=recurse):
            state.unit.reshards_after_backward = reshard_after_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether whole parameters are freed after the forward pass."""
        for state in self._states(recurse=recurse):
            state.unit.reshard_after_forward = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of the gradients of all ranks is divided by: not their number."""
        for state in self._states(recurse=False):
            state.unit.divide_factor = factor
