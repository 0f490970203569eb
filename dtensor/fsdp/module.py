"""What may be asked of a sharded module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self, cast

from torch import nn

from dtckpt.errors import PlacementError, UnsupportedOp

from ..mesh.device_mesh import DeviceMesh
from ..torch_private import in_backward
from .custom_comms import AllGather, ReduceScatter, memory_of_group, require_comm
from .gradients import Hook
from .state import ForwardMethod, State, state_of, states_below
from .unit import Unit


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
    setattr(module, method_name, ForwardMethod(state, module, method))


class UnshardHandle:
    """What ``FSDPModule.unshard(async_op=True)`` returns."""

    def __init__(self, states: Sequence[State] = ()) -> None:
        self._states = states

    def wait(self) -> None:
        """Wait until the parameters are whole, and stand in the modules."""
        states, self._states = self._states, ()
        for state in states:
            state.unshard()


class GradientReductionHandle:
    """What ``FSDPModule.finalize_backward(async_op=True)`` returns."""

    def __init__(self, root: State | None = None) -> None:
        self._root = root
        if root is not None:
            root.finalization = self

    def wait(self) -> None:
        """Wait until gradients are reduced.

        Raises RuntimeError where ``reset_iter_state`` was called meanwhile.
        """
        root, self._root = self._root, None
        if root is None:
            return
        if root.finalization is not self:
            raise RuntimeError(
                "this reduction of gradients was dropped by reset_iter_state(): run the step again"
            )
        root.finalization = None


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Have several models gather their parameters on one stream, as the stages of a pipeline.

    Models on one mesh do so anyhow. There are no streams on CPUs.
    """
    states = _states_of("share_comm_ctx", modules)
    for state in states:
        for module in state.modules:
            for one in states_below(cast(nn.Module, module())):
                one.unit.stream = states[0].unit.side_stream()


class FSDPModule:
    """What ``fully_shard`` makes of a module: its class is a subclass of both.

    Settings hold for the module and, with ``recurse``, for all sharded ones in it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a module of the class that was sharded, without being sharded itself."""
        original = cls.__mro__[2]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with its parameters whole; they are sharded after, whatever stops it."""
        state = self._state
        depth = len(state.saving)
        try:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
        except BaseException:
            state.unwind(cast(nn.Module, self), depth)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a sharded module of its own, whose parameters and gradients are copies.

        Raises PlacementError while a forward or backward pass runs.
        """
        states = self._states(recurse=True)
        if any(state.saving or state.is_in_backward for state in states):
            raise PlacementError("a sharded module is copied between passes, not while one runs")
        for state in states:
            state.put_back()
        made: Self = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a function to the sharded parameters and all else, as ``to`` does."""
        for state in self._states(recurse=True):
            state.end_interrupted()
            state.put_back()
            state.unit.free()
        return super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

    def _states(self, *, recurse: bool) -> list[State]:
        module = cast(nn.Module, self)
        return list(states_below(module)) if recurse else [self._state]

    def _root(self, method: str) -> State:
        """Return the state of the outermost sharded module; RuntimeError where this is another."""
        state = self._state
        if state.is_root is False:
            raise RuntimeError(
                f"{method} is a method of the outermost sharded module, which ran first; got a "
                f"{type(self).__name__} within it"
            )
        if not state.below:
            state.below = self._states(recurse=True)
        return state

    @property
    def _state(self) -> State:
        return cast(State, state_of(cast(nn.Module, self)))

    def unshard(self, async_op: bool = False, *, recurse: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, and with ``recurse`` of those in it, now.

        ``parameters()`` are whole tensors then, plain ones where they were plain before
        ``fully_shard``, until ``reshard()`` or the end of a backward pass. Gradients of what is
        computed with them go to the sharded parameters, and are reduced as those of the module are.

        With ``async_op`` they are under way; the next forward pass waits for them, or the handle.
        """
        states = self._states(recurse=recurse)
        for state in states:
            if not state.was_asked_for:
                state.put_back()
                state.unit.free()
            if async_op:
                state.unit.start_gathering()
            else:
                state.unshard()
            state.was_asked_for = True
        return UnshardHandle(states) if async_op else None

    def reshard(self, *, recurse: bool = False) -> None:
        """Free the whole parameters of this module, and with ``recurse`` of those in it.

        ``parameters()`` are the sharded ones again.
        """
        for state in self._states(recurse=recurse):
            state.put_back()
            state.unit.free()
            state.was_asked_for = False

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether whole parameters lie at the same place in memory each time, as graphs need.

        Their memory is not free between the passes then.
        """
        for state in self._states(recurse=recurse):
            state.unit.keeps_storage = keep
            for one in state.unit.held:
                one.storage = one.whole if keep else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that wait for their reduction, too.

        The ``zero_grad`` of an optimizer does not know of these.
        """
        for state in self._states(recurse=True):
            state.end_interrupted()
            state.put_back()  # else whole parameters may stand where those with gradients do
            state.unit.gradients.forget()
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def reduce_gradients(self) -> None:
        """Reduce, now, what waits in this module and all in it, and add it to the gradients.

        For what backward passes without synchronization have left; every rank calls it. Passes
        that follow add to it.
        """
        for state in self._states(recurse=True):
            state.unit.reduce_pending(anyway=True)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether a backward pass reduces gradients; else they are added up on each rank.

        What waits is reduced with the gradients of the next pass that does.
        """
        for state in self._states(recurse=recurse):
            state.unit.gradients.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are also summed over the axes that repeat parameters (HSDP).

        Else each rank adds up its part of the sums over those that share a parameter, which are all
        reduced with the gradients of the next pass that does.
        """
        for state in self._states(recurse=recurse):
            state.unit.gradients.all_reduces = requires_all_reduce

    def reset_iter_state(self) -> None:
        """Forget a forward or backward pass that an error has stopped; of the outermost module.

        Whole parameters are freed, and gradients that wait are dropped: an accumulation has to
        start again. Gradients that parameters have stay. The next forward pass does the same but
        for the gradients. Raises RuntimeError for a module within a sharded one.
        """
        root = self._root("reset_iter_state")
        root.reset()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether ``finalize_backward`` ends backward passes; of the outermost module.

        Else each ends by itself, as ``set_is_last_backward`` says. With it, what waits when a
        backward pass ends goes on to do so until ``finalize_backward``: gradients of units that
        the pass did not come to, and of passes without synchronization.

        Raises RuntimeError for a module within a sharded one, and between the begin of a backward
        pass and its finalization, unless nothing changes.
        """
        root = self._root("set_manual_backward_finalization")
        if enabled != root.finalizes_manually and (in_backward() or root.awaits_finalization):
            raise RuntimeError(
                "set_manual_backward_finalization: a backward pass has begun, and was not "
                "finalized; call it before, or after finalize_backward() or reset_iter_state()"
            )
        root.finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what waits in all units and is to be reduced now, after all backward passes.

        For ``set_manual_backward_finalization(True)``; every rank calls it. With ``async_op``
        returns a handle to wait for before gradients are used; reductions are over by then, as no
        unit leaves its own under way. Nothing happens before the first forward pass.

        Raises RuntimeError for a module within a sharded one, without manual finalization, within
        a backward pass, while an earlier handle was not waited for, and where sums over the axes
        that repeat parameters are to wait (``set_requires_all_reduce(False)``).
        """
        if self._state.is_root is None:
            return GradientReductionHandle() if async_op else None
        root = self._root("finalize_backward")
        wrong = {
            "set_manual_backward_finalization(True) was not called": not root.finalizes_manually,
            "a backward pass runs": in_backward(),
            "the handle of the call before was not waited for": root.finalization is not None,
            "set_requires_all_reduce(False) holds, so that sums would be left": any(
                not state.unit.gradients.all_reduces and state.unit.data.num_replicate
                for state in root.below
            ),
        }
        for reason, is_so in wrong.items():
            if is_so:
                raise RuntimeError(f"finalize_backward: {reason}")
        for state in root.below:
            state.end_interrupted()
        root.reduce_rest()
        root.awaits_finalization = False
        return GradientReductionHandle(root) if async_op else None

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether a backward pass is the last one before the optimizer steps.

        At the end of that, what waits in units that it did not come to is reduced. Between several
        backward passes for one step that is left to the last one.
        """
        for state in self._states(recurse=True):
            state.is_last_backward = is_last_backward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether whole parameters are freed after the backward pass."""
        for state in self._states(recurse=recurse):
            state.unit.reshards_after_backward = reshard_after_backward

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Set what becomes of whole parameters after the forward pass, as for ``fully_shard``.

        A number makes process groups, where there are none for it yet: all ranks call it.
        """
        states = self._states(recurse=recurse)
        found = [resharding(state.unit, reshard_after_forward) for state in states]
        for state, (reshard, mesh) in zip(states, found, strict=True):
            state.unit.reshard_after_forward = reshard
            state.unit.keep_among(mesh)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether parameters are gathered as the backward pass comes to this module.

        For modules whose backward pass needs none, as an embedding. What needs one after all
        gathers them then.
        """
        self._state.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Have the parameters of other modules under way while this one runs forward.

        Each list replaces the one before; an empty one leaves it to the library, which prefetches
        the module that came next in the last pass on accelerators, and none on CPUs.
        """
        self._state.prefetched_in_forward = _states_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Do the same while this one runs backward."""
        self._state.prefetched_in_backward = _states_of("set_modules_to_backward_prefetch", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward pass wait for an event, not for all that is queued, to gather.

        For optimizers that step on a stream of their own. It counts once, for this module.
        """
        self._state.post_optim_event = event

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call ``set_gradient_divide_factor``, which is the newer name."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated: call set_gradient_divide_factor",
            DeprecationWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of the gradients of all ranks is divided by: not their number."""
        self._state.unit.gradients.divide_factor = factor

    def set_all_reduce_hook(self, hook: Hook, *, stream: Any = None) -> None:
        """Set what is called with the reduced gradients of this rank, before parameters have them.

        It gets one row of all elements for each dtype, and may write to it: to reduce over ranks
        that the mesh does not know of. ``stream`` is where it runs, on accelerators.

        Raises PlacementError for a stream where the mesh repeats parameters itself.
        """
        gradients = self._state.unit.gradients
        if stream is not None and gradients.data.num_replicate:
            raise PlacementError("stream cannot be set when using native HSDP")
        gradients.hook, gradients.hook_stream = hook, stream

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Ask for reductions by sums alone. Nothing changes: no others are ever sent."""
        del enable

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Set what gathers the parameters of this module over the ranks that share them.

        ``comm.allocate(size, dtype=, device=)`` returns a flat buffer for all ranks, of which this
        one's stretch is filled in; ``comm(output_tensor=, input_tensor=, group=, async_op=True)``
        fills the others, and returns work to wait for, or None. It is called once for each dtype.
        That all ranks gather the same module is not checked then.

        Raises PlacementError for another object, and beside
        ``set_allocate_memory_from_process_group_for_comm``.
        """
        require_comm("set_custom_all_gather", comm)
        self._require_own_memory("set_custom_all_gather")
        self._state.unit.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Set what sums the gradients of this module over the ranks that share parameters.

        As for ``set_custom_all_gather``; it also gets ``op=ReduceOp.SUM``, whatever the sums are
        divided by, and ``allocate`` is called for both buffers. Sums over the axes that repeat
        parameters follow, by the library.
        """
        require_comm("set_custom_reduce_scatter", comm)
        self._require_own_memory("set_custom_reduce_scatter")
        self._state.unit.gradients.reduce_scatter = comm

    def _require_own_memory(self, method: str) -> None:
        if self._state.unit.memory is not nullcontext:
            raise PlacementError(
                f"{method} allocates buffers by itself: call "
                "set_allocate_memory_from_process_group_for_comm(False) first"
            )

    def _require_no_comms(self, method: str) -> None:
        unit = self._state.unit
        if unit.all_gather is not None or unit.gradients.reduce_scatter is not None:
            raise PlacementError(
                f"{method} has no effect on a module with set_custom_all_gather or "
                "set_custom_reduce_scatter, which allocate buffers by themselves"
            )

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that no rank used in a backward pass get gradients of zeros.

        A parameter that only some ranks used counts as zero on the others in any case. With it,
        units that the pass did not come to on this rank are reduced at its end, too.
        """
        for state in self._states(recurse=recurse):
            state.unit.gradients.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Ask for so many buffers of reductions under way. Nothing changes: each has its own.

        Raises TypeError for what is no int, and ValueError for less than 1.
        """
        del recurse
        given: Any = max_input_buffers
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(
                "set_reduce_scatter_max_input_buffers: max_input_buffers must be an int, got a "
                f"{type(given).__name__}"
            )
        if given < 1:
            raise ValueError(
                "set_reduce_scatter_max_input_buffers: max_input_buffers must be a positive int, "
                f"got {given}"
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Ask for a process group of its own for reductions. Nothing changes: no gather runs
        beside them that a second communicator would let overlap.
        """
        del enable, recurse

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Ask for buffers in symmetric memory. Nothing changes: buffers lie in ordinary memory.

        Raises ValueError for another backend, UnsupportedOp where the mesh does not lie on CUDA
        devices, and PlacementError beside collectives of the user.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: backend must be 'NCCL', got {backend!r}")
        self._require_no_comms("set_symm_mem_for_comm")
        mesh = self._state.unit.data.mesh
        if mesh.device.type != "cuda":
            raise UnsupportedOp(
                f"set_symm_mem_for_comm needs process groups of NCCL; those of {mesh} are on "
                f"{mesh.device}"
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether buffers of communication are allocated by the process group (NCCL).

        Raises UnsupportedOp for groups that allocate no memory.
        """
        self._require_no_comms("set_allocate_memory_from_process_group_for_comm")
        unit = self._state.unit
        mesh = unit.data.mesh
        axes = tuple(range(unit.data.num_replicate, mesh.ndim)) or tuple(range(mesh.ndim))
        memory = memory_of_group(mesh.group_of(axes), mesh.device) if enable else None
        if enable and memory is None:
            raise UnsupportedOp(
                "set_allocate_memory_from_process_group_for_comm needs process groups of NCCL, "
                f"which allocate memory; those of {mesh} on {mesh.device} do not"
            )
        unit.memory = memory or nullcontext


def resharding(
    unit: Unit, reshard_after_forward: object
) -> tuple[bool | int | None, DeviceMesh | None]:
    """Return what becomes of parameters after the forward pass, and the mesh of a smaller group.

    One rank by itself keeps all, which is False, and all ranks that share them keep their parts:
    True. So a number is right on fewer ranks, too.
    """
    if isinstance(reshard_after_forward, bool | None):
        return reshard_after_forward, None
    if not isinstance(reshard_after_forward, int):
        raise PlacementError(
            "fully_shard: reshard_after_forward is True, False, None or a number of ranks, got "
            f"{reshard_after_forward!r}"
        )
    if reshard_after_forward in (1, unit.data.num_shards):
        return reshard_after_forward != 1, None
    return reshard_after_forward, unit.data.smaller(reshard_after_forward)


def _states_of(method: str, modules: Sequence[Any]) -> list[State]:
    found = [state_of(module) for module in modules]
    for module, state in zip(modules, found, strict=True):
        if state is None:
            raise PlacementError(
                f"{method} takes modules that fully_shard treated, got a {type(module).__name__}"
            )
    return cast("list[State]", found)
