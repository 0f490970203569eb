"""Plans: what one kind of call does on this rank, prepared once and run often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..ops.engine.primitives import Move, move
from ..tensor.arguments import collect_tensors
from ..tensor.schemas import Op, functional_of
from ..tensor.views.copied_view import (
    CopiedView,
    ViewCall,
    mark_copied,
    refresh,
    remember_written_through,
    write_view,
)
from ..tensor.views.irregular import Irregular, keep_doubt, regular_local, store, views_of
from ..tensor.wrapper import (
    Wrapper,
    construct,
    counting_writes,
    new_wrapper,
    refuse_part,
)
from ..torch_private import base_of
from .binding import Bound
from .call import Call

aten = torch.ops.aten

_SEVERAL = (list, tuple)
_LOOK_AT_ELEMENTS = (aten.cumsum_.default, aten.cumprod_.default)
"""Operators that refuse dtypes when they come to an element, and of no elements take all."""
_in_inference = torch.is_inference_mode_enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """Redistribute some inputs, run something on local tensors, wrap its results."""

    op: Op
    run_local: Callable[..., Any]
    moves: tuple[Move, ...]
    """Inputs that are redistributed."""
    outputs: tuple[DTensorSpec | None, ...]
    """None where the output is no tensor, or plain as all that it comes from is."""
    written: tuple[int, ...] = ()
    """Inputs that are written in place, in the order of the outputs."""
    written_back: tuple[Move, ...] = ()
    """Those of them that had to be redistributed for it, from there to where they lie."""
    view_call: ViewCall | None = None
    """The call itself, but for the viewed tensor, where the operator makes views."""
    copies: bool = False
    """Whether a view is a copy on some ranks, and so counts as one on all of them."""

    def run(self, bound: Bound) -> Any:
        """Return what the operator returns, as distributed tensors."""
        call, leaves = bound.call, bound.leaves
        lead = call.args[0] if call.args else None
        if any(isinstance(leaves[index], CopiedView) for index in self.written):
            return self._run_on_views(call)
        if (
            self.moves
            and isinstance(lead, list)
            and len(lead) > 1
            and self._moves_what_it_writes(leaves)
        ):
            return self._run_one_by_one(call)
        viewed, view_call = leaves[0], self.view_call
        if view_call is not None and isinstance(viewed, Irregular) and self._views_parts:
            return self._run_on_irregular(viewed, view_call)
        locals_ = [regular_local(leaf) for leaf in leaves]
        if self.moves:
            move(locals_, self.moves)
        local_args, local_kwargs = call.replaced(locals_)
        result = self.run_local(*local_args, **local_kwargs)
        if self.written:
            self._write_back(leaves, locals_)
            return lead if isinstance(lead, Tensor) else None
        wrapped = self.finish(call.cls, leaves[0], locals_[0], result)
        if self.op is aten.detach.default:
            keep_doubt(wrapped, leaves[0])
        if self.moves and self.op is aten._unsafe_view.default:
            made = ViewCall(self.op, call.args[1:], call.kwargs)
            remember_written_through(wrapped, leaves[0], made)
        return wrapped

    @property
    def _views_parts(self) -> bool:
        """Whether views are such of the memory that each rank has."""
        return not self.moves and not self.copies

    def _run_on_irregular(self, viewed: Wrapper, call: ViewCall) -> Any:
        """Return views of a part, as far as its memory allows."""

        def run(tensor: Tensor) -> Any:
            return self.run_local(tensor, *call.args, **call.kwargs)

        if _in_inference() and not viewed.is_inference():
            with counting_writes():
                return views_of(viewed, run, self.outputs)
        return views_of(viewed, run, self.outputs)

    def _run_on_views(self, call: Call) -> Any:
        """Run an operator in place on views in name only, so that the viewed tensors see it."""
        functional = functional_of(self.op) or self.op  # a plan in place was made from the former
        lead = call.args[0]
        if isinstance(lead, CopiedView):
            # Comparisons return bools, and write zeros and ones of the dtype that the view has.
            made = functional(*call.args, **call.kwargs)
            self._require_cast(made, lead)
            write_view(lead, made.to(lead.dtype))
            return lead
        # One element of the lists after the other, as on one device: one may be a view of another.
        for index, target in enumerate(lead):
            args = [_element(arg, index) for arg in call.args]
            refresh(target)
            made = functional(*args, **call.kwargs)[0]
            self._require_cast(made, target)
            target.copy_(made)
        return None

    def _require_cast(self, made: Tensor, target: Tensor) -> None:
        """Raise, as the operator in place does, where its result does not fit the dtype."""
        if made.numel() == 0 and self.op in _LOOK_AT_ELEMENTS:
            return
        if not torch.can_cast(made.dtype, target.dtype):
            raise RuntimeError(
                f"{self.op}: its result is {made.dtype}, and cannot be written to {target.dtype}; "
                "cast the tensor that is written, or use the operator that returns a new one"
            )

    def _moves_what_it_writes(self, leaves: Sequence[Tensor]) -> bool:
        """Whether one element of the lists is to be moved after the write to another one.

        By what all ranks know: which are one tensor, or views of one.
        """
        if not self.written:
            return False
        bases = [base_of(leaf) for leaf in leaves]
        roots = [
            id(leaf if base is None else base) for leaf, base in zip(leaves, bases, strict=True)
        ]
        writes = Counter(roots[index] for index in self.written)
        moved = {index for index, _, _ in self.moves}
        return any(writes[roots[index]] > (index in self.written) for index in moved)

    def _run_one_by_one(self, call: Call) -> None:
        for index in range(len(call.args[0])):
            args = [_element(arg, index) for arg in call.args]
            self.op(*args, **call.kwargs)

    def finish(self, cls: type[Wrapper], first: Any, local: Any, result: Any) -> Any:
        """Return what the operator returns; ``first`` is its first argument, and the local one."""
        if self.written:
            return first if isinstance(first, Tensor) else None
        call = self.view_call
        if call is None:
            return self._wrapped(cls, result)
        if _was_copied(result, local) and self._views_parts and not isinstance(first, CopiedView):
            return self._run_on_irregular(first, call)
        if _in_inference() and not first.is_inference():
            with counting_writes():
                wrapped = self._wrapped(cls, result)
        else:
            wrapped = self._wrapped(cls, result)
        if self.moves or self.copies or isinstance(first, CopiedView):
            made: list[Tensor] = []
            collect_tensors([wrapped], made)
            mark_copied(made, first, call, self.moves[0][2].placements if self.moves else None)
        return wrapped

    def _write_back(self, leaves: Sequence[Tensor], locals_: list[Tensor]) -> None:
        """Bring new values to where the tensors lie: other views of their memory see them too."""
        move(locals_, self.written_back)
        moved = {index for index, _, _ in self.written_back}
        for index in self.written:
            leaf = leaves[index]
            if isinstance(leaf, Wrapper) and (index in moved or isinstance(leaf, Irregular)):
                store(leaf, locals_[index])

    def _wrapped(self, cls: type[Wrapper], result: Any) -> Any:
        outputs = self.outputs
        if isinstance(result, Tensor):
            spec = outputs[0]
            if spec is None:
                return result
            if result.dtype is not spec.dtype or result.shape != spec.local_shape:
                refuse_part(self.op, result, spec)
            return new_wrapper(cls, result, spec, False)
        if isinstance(result, _SEVERAL):
            results: Any = result
            made: list[Any] = []
            counts = not _in_inference()
            # Without a function call for each, as lists are long.
            for local, spec in zip(results, outputs, strict=True):
                if spec is None or local is None:
                    made.append(local)
                    continue
                if local.dtype is not spec.dtype or local.shape != spec.local_shape:
                    refuse_part(self.op, local, spec)
                if counts and not local.storage_offset():
                    made.append(construct(cls, local, spec, False))
                else:
                    made.append(new_wrapper(cls, local, spec, False))
            return type(results)(made)
        return result


def _element(arg: Any, index: int) -> Any:
    """Return what one element of the lists has of an argument."""
    return [arg[index]] if isinstance(arg, list) else arg


def _was_copied(result: Any, local: Tensor) -> bool:
    """Whether a local view had to be a copy, as where strides do not allow the shape."""
    if not isinstance(result, Tensor) or result.numel() == 0:
        return False
    if type(result) is not Tensor and hasattr(result, "__tensor_flatten__"):
        return not _shares_parts(result, local)
    return result.untyped_storage() is not local.untyped_storage()  # to ask for addresses may copy


def _shares_parts(view: Any, viewed: Any) -> bool:
    """Whether tensors of a class that wraps others, and has no memory, share that of a part."""
    names: list[str] = view.__tensor_flatten__()[0]
    for name in names:
        one, other = getattr(view, name), getattr(viewed, name, None)
        if isinstance(other, Tensor) and not _was_copied(one, other):
            return True
    return False
