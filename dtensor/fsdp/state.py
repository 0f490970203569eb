"""What runs when sharded modules do: their hooks, and what is prefetched."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..tensor.compilers import opaque
from ..tensor.trees import flatten_tree, map_tensors
from ..tensor.wrapper import Wrapper
from ..torch_private import in_backward, saved_hooks, when_backward_ends
from .notes import Noting
from .state_dicts import StateDictHook
from .unit import Unit

_ATTRIBUTE = "_dtckpt_fsdp_state"
_STATES: WeakSet[State] = WeakSet()
"""All that live in this process: a checkpoint is given parameters without their modules."""


@opaque
class State:
    """A unit while its modules run: one module, or several that are gathered together."""

    def __init__(self, modules: Sequence[nn.Module], unit: Unit) -> None:
        self.unit = unit
        self.modules = tuple(ref(module) for module in modules)
        self.is_root: bool | None = None
        """None before the first forward pass."""
        self.below: list[State] = []
        """All states of the root and in it; of the root only."""
        self.saving: list[Noting | None] = []
        """One for each forward pass that runs, the innermost last."""
        self.ran: set[int] = set()
        """Those of the modules that ran in this pass, while others have not yet."""
        self.is_in_backward = False
        self.failure: ref[Any] | None = None
        """Tells of the end of a backward pass that failed, while one runs."""
        self.was_asked_for = False
        """Whether the user has gathered the parameters for the next forward pass."""
        self.was_kept = False
        """Whether the last backward pass was to leave them whole."""
        self.unshards_in_backward = True
        self.is_last_backward = True
        self.reduction: ref[Any] | None = None
        """Lives while a backward pass runs that reduces what waits as it ends; of the root only."""
        self.prefetched_in_forward: list[State] = []
        self.prefetched_in_backward: list[State] = []
        self.prefetches = unit.data.mesh.device.type != "cpu"
        """Whether units are prefetched in the order of the last pass, where none is given; of the
        root only."""
        self.order: list[State] = []
        """The states that ran in this forward pass; of the root only."""
        self.last_order: list[State] = []
        self.root: State = self
        self.post_optim_event: Any = None
        self.finalizes_manually = False
        """Whether backward passes leave it to ``finalize_backward`` to reduce what waits; of the
        root only."""
        self.awaits_finalization = False
        """Whether one has begun since that was called; of the root only."""
        _STATES.add(self)
        self.finalization: object = None
        """Stands for a finalization that is to be waited for; of the root only."""
        for module in modules:
            vars(module)[_ATTRIBUTE] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward)
        parts = [part for one in unit.held for part, _ in one.places]
        for part in dict.fromkeys([*modules, *parts]):
            # Of each part that has parameters, too: state dicts may be asked for or loaded there.
            part.register_state_dict_pre_hook(self.before_state_dict)
            part.register_state_dict_post_hook(StateDictHook(unit, warns=part in modules))
            part.register_load_state_dict_pre_hook(self.before_state_dict)

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make the parameters whole, and cast the inputs."""
        if self.is_root is None:
            self._become_root(module, (args, kwargs))
        if self.is_root and not self.saving and not in_backward():
            self._begin_pass()
        is_inner = bool(self.saving) or self.is_in_backward
        unit = self.unit
        self.saving.append(None)
        if is_inner:
            unit.gather()
            if not unit.stands:
                unit.show()
        elif self.ran and unit.shown and unit.written() == unit.versions:
            unit.show_again()
        else:
            unit.hide()
            keeps = self.was_asked_for or self.was_kept or not unit.reshards_after_backward
            event, self.post_optim_event = self.post_optim_event, None
            unit.gather(anew=not keeps, after=event)
            unit.show(when_reduced=self.after_reduction)
            self._end_at_inputs(args, kwargs)
        self.was_asked_for = self.was_kept = False
        if not is_inner and not in_backward():
            self._prefetch_forward()
        self.saving[-1] = notes = Noting(unit)
        notes.enter()
        policy, device = unit.precision, unit.data.mesh.device
        return map_tensors(
            partial(
                _as_input,
                dtype=policy.param_dtype if policy.cast_forward_inputs else None,
                device=None if is_inner or not self.is_root or device.type == "cpu" else device,
            ),
            (args, kwargs),
        )

    def _end_at_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the gradients of inputs end the unit in the backward pass where no others will.

        Autograd runs what was recorded last first, so that any of them comes after the module. But
        not those of leaves, which have no turn: they come at once.
        """
        if not torch.is_grad_enabled() or any(one.requires_grad for one in self.unit.shown):
            return

        def end_after(tensor: Tensor) -> Tensor:
            if not tensor.is_leaf:
                tensor.register_hook(self.after_backward)
            return tensor

        map_tensors(end_after, (args, kwargs))

    def _become_root(self, module: nn.Module, inputs: object) -> None:
        below = list(states_below(module))
        leaves, _ = flatten_tree(inputs)
        if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in leaves):
            _require_values(module, below)
        for state in below:
            state.is_root, state.below, state.root = False, [], self
        self.is_root, self.below = True, below

    def _begin_pass(self) -> None:
        """End what an exception has left, and what no module came to use."""
        for state in reversed(self.below):
            state.end_running()
            state.end_interrupted()
            state.end_forward()
            if not state.was_asked_for:
                state.unit.drop()
        self.last_order, self.order = self.order, []
        self.reduction = None

    def end_running(self) -> None:
        """End forward passes that still run, for all that is known: Ctrl-C stopped their end."""
        while self.saving:
            notes = self.saving.pop()
            if notes is not None and saved_hooks() is not None:
                notes.leave()

    def reset(self) -> None:
        """End all passes, free the whole parameters and drop gradients that wait; of the root."""
        for state in reversed(self.below):
            unit = state.unit
            unit.marks = []  # what was written to whole parameters is lost with them
            state.end_running()
            state.is_in_backward, state.failure = False, None
            state.ran.clear()
            state.was_asked_for = state.was_kept = False
            unit.hide()
            unit.free()
            unit.gradients.forget()
            unit.has_reduced = False
        self.order, self.last_order = [], []
        self.reduction = self.finalization = None
        self.awaits_finalization = False

    def _prefetch_forward(self) -> None:
        root, states = self.root, self.prefetched_in_forward
        if root.saving:  # else there is no end of those that run without it
            root.order.append(self)
            place = len(root.order)
            if not states and root.prefetches and root.last_order[:place] == root.order:
                states = root.last_order[place : place + 1]
        for state in states:
            state.unit.start_gathering()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the sharded parameters back; the backward pass begins with the output."""
        del args
        notes = self.saving[-1]
        if notes is not None:
            notes.leave()
        if len(self.saving) == 1:
            output = self._made(output)
            self._put_back(module)
        self.saving.pop()  # last, so that whatever stops this leaves the pass to ``unwind``
        return output

    def _made(self, output: Any) -> Any:
        """Return an output in the dtype that was asked for, from which a backward pass begins."""
        wanted = self.unit.precision.output_dtype

        def change(tensor: Tensor) -> Tensor:
            made = tensor if wanted is None else _cast(tensor, wanted)
            if made.requires_grad and torch.is_grad_enabled():
                made.register_hook(self.before_backward)
            return made

        return map_tensors(change, output)

    def _put_back(self, module: nn.Module) -> None:
        """Put the sharded parameters back, and free the whole ones if no more modules run."""
        # A forward pass within a backward one is made anew for that, as by checkpointing.
        if not self.is_in_backward:
            self.ran.add(id(module))
            self.unit.hide(later_again=True)
            if len(self.ran) == len(self.modules):
                self.end_forward()
        if self.is_root:
            for state in self.below:
                state.end_forward()

    def unwind(self, module: nn.Module, depth: int) -> None:
        """End the forward passes that something has stopped, all but ``depth`` of them.

        Hooks of modules do not: none is called where Ctrl-C in a notebook stops a pass, and
        programs go on after it.
        """
        if len(self.saving) > depth:
            try:
                self.after_forward(module, (), None)
            finally:
                del self.saving[depth:]
                for state in (self, *self.below):
                    state.put_back()

    def end_forward(self) -> None:
        """Free the parameters between the passes, where all modules ran, or no more will."""
        if not self.ran:
            return
        unit = self.unit
        self.ran.clear()
        wanted = unit.reshard_after_forward
        reshards = not self.is_root if wanted is None else wanted
        if torch.is_grad_enabled() and reshards is False:
            unit.show_again()  # they stay whole until the backward pass, and can be looked at
            return
        unit.hide()
        if not torch.is_grad_enabled() or reshards is True:
            unit.free()
        else:
            unit.shrink()

    def unshard(self) -> None:
        """Make the parameters whole now, and have them stand in the modules."""
        unit = self.unit
        unit.gather()
        if not unit.stands:
            # With gradients also where none are recorded now: they may be as the tensors are used.
            with torch.inference_mode(False), torch.enable_grad():
                unit.show(when_reduced=self.after_reduction)

    def put_back(self) -> None:
        """Have the sharded parameters stand in the modules, unless these run now."""
        if not self.saving and not self.is_in_backward:
            self.unit.hide()

    def before_state_dict(self, *_: Any) -> None:
        """Do so before parameters are put into a state dict, or loaded from one."""
        self.put_back()

    def before_backward(self, grad: Tensor) -> None:
        """Make the parameters whole again; ``grad`` is that of some output."""
        del grad
        if self.is_in_backward:
            return
        self.end_forward()
        self.put_back()
        self.is_in_backward = True
        self._end_with_pass()  # before what follows, which may fail
        if self.unshards_in_backward:
            self.unit.gather()
            with torch.enable_grad():  # what is made anew is to save what was saved before
                self.unit.show()
        self._reduce_pending_at_end()
        self._prefetch_backward()

    def _end_with_pass(self) -> None:
        """Have the unit end with the backward pass that runs, also where that fails.

        Autograd calls nothing then, but lets go of what it was to call.
        """
        ends = partial(State.end_unit, self)
        if when_backward_ends(ends):
            self.failure = ref(ends, lambda _: self.end_unit())

    def _reduce_pending_at_end(self) -> None:
        """Have the root reduce what waits in all units, wherever the backward pass began."""
        root = self.root
        root.awaits_finalization = root.finalizes_manually
        if root.reduction is None or root.reduction() is None:
            ends = partial(State.reduce_pending, root)
            when_backward_ends(ends)
            root.reduction = ref(ends)

    def _prefetch_backward(self) -> None:
        root, states = self.root, self.prefetched_in_backward
        if not states and root.prefetches and self in root.order:
            place = root.order.index(self)
            states = root.order[max(place - 1, 0) : place]
        for state in states:
            if state.unshards_in_backward and not state.is_in_backward:
                state.unit.start_gathering()

    def end_unit(self) -> None:
        """Put the sharded parameters back, and free the whole ones, once all gradients have come.

        Whoever still needs one gathers them again.
        """
        if self.is_in_backward or not self.saving:
            self.is_in_backward = False
            self.unit.hide()
        self.was_kept = not self.unit.reshards_after_backward
        if not self.was_kept:
            self.unit.free()
        self.failure = None

    def after_backward(self, grad: Tensor) -> None:
        """End a unit without gradients of its own; ``grad`` is that of some input."""
        del grad
        if self.is_in_backward:
            self.end_unit()

    def after_reduction(self) -> None:
        """End the unit in this backward pass, be it that no output told of its beginning."""
        self.end_unit()
        self._reduce_pending_at_end()

    def end_interrupted(self) -> None:
        """End a backward pass that failed, where a thread of an accelerator still holds it."""
        if self.is_in_backward and not in_backward():
            self.end_unit()

    def reduce_pending(self) -> None:
        """Reduce what still waits in all units at the end of a backward pass; of the root."""
        self.reduction = None
        if self.is_last_backward and not self.finalizes_manually:
            self.reduce_rest()

    def reduce_rest(self) -> None:
        """Reduce what waits, and is to wait no longer, in all units; of the root."""
        for state in self.below:
            state.unit.reduce_pending()
            state.unit.has_reduced = False

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        made = object.__new__(State)
        memo[id(self)] = made
        vars(made).update(vars(self))
        made.unit = copy.deepcopy(self.unit, memo)
        made.modules = tuple(
            ref(copy.deepcopy(module, memo))
            for one in self.modules
            if (module := one()) is not None
        )
        made.saving, made.ran = [], set()
        made.is_root, made.root, made.below, made.order, made.last_order = None, made, [], [], []
        made.is_in_backward = made.was_asked_for = made.was_kept = False
        made.reduction = made.failure = made.finalization = None
        made.awaits_finalization = False
        for name in ("prefetched_in_forward", "prefetched_in_backward"):
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        made.post_optim_event = None
        _STATES.add(made)
        return made


class ForwardMethod:
    """Another method of a sharded module, which has its parameters whole as ``forward`` has."""

    def __init__(self, state: State, module: nn.Module, method: Any) -> None:
        update_wrapper(self, method)
        self.state, self.module, self.method = state, module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = self.state, self.module
        depth = len(state.saving)
        try:
            args, kwargs = state.before_forward(module, args, kwargs) or (args, kwargs)
            return state.after_forward(module, args, self.method(*args, **kwargs))
        except BaseException:
            state.unwind(module, depth)
            raise


def _require_values(root: nn.Module, states: Sequence[State]) -> None:
    """Raise PlacementError where parameters have no values yet, though inputs have."""
    names = {id(part): name for name, part in root.named_modules()}
    for state in states:
        # What stands there now: a state dict may have been assigned since.
        places = [one.places[0] for one in state.unit.held]
        without = [
            ".".join(filter(None, (names.get(id(part)), name)))
            for part, name in places
            if isinstance(now := getattr(part, name, None), Tensor) and now.is_meta
        ]
        if without:
            raise PlacementError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {without}. Call to_empty(device=) of the "
                "module, and give them values"
            )


def _as_input(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """Return an input in the dtype of the computation and, of the root, on the device."""
    if device is not None and not isinstance(tensor, Wrapper):
        tensor = tensor.to(device)
    return tensor if dtype is None else _cast(tensor, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def state_of(module: nn.Module) -> State | None:
    """Return the state of a sharded module; None for others."""
    return vars(module).get(_ATTRIBUTE)


def put_back(module: nn.Module) -> None:
    """Have the sharded parameters stand in a module and in all sharded ones in it."""
    for state in states_below(module):
        state.put_back()


def states_below(module: nn.Module) -> Iterator[State]:
    """Yield the states of a module and of all sharded ones in it, each once."""
    seen: set[int] = set()
    for part in module.modules():
        found = state_of(part)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found


def gathered_tensors() -> Iterator[Tensor]:
    """Yield what stands in modules of this process in the place of sharded parameters.

    What is written to it is lost at the next reshard.
    """
    for state in list(_STATES):
        if state.unit.stands:
            yield from state.unit.shown
