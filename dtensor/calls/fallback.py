"""What happens to operators without a rule: decomposed, or gathered and run whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from logging import DEBUG, INFO
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import DtckptError, PlacementError, UnsupportedOp
from dtckpt.logs import logger_of

from ..comm.caches import Cache
from ..comm.traffic import Collective, Observer, add_observer, call_site, remove_observer
from ..geometry.placement import Replicate
from ..mesh.modes import implicit_replication, is_strict
from ..mesh.spec import DTensorSpec, replicated_spec, spec_of
from ..redistribute import redistribute_local, redistribute_locals
from ..tensor.arguments import collect_tensors, map_tensors
from ..tensor.inplace_views import change_shape, changes_shape, resize
from ..tensor.schemas import Op, base_name, functional_of, is_random, is_written
from ..tensor.views.copied_view import (
    CopiedView,
    ViewCall,
    mark_copied,
    refuse_lost_writes,
    write_past,
)
from ..tensor.views.irregular import Irregular, regular_local, store
from ..tensor.wrapper import Wrapper
from ..torch_private import decompositions, has_modes, is_composite, outside_modes, schema_of
from .binding import Bound, only_written
from .call import Call
from .keys import Key
from .metas import output_metas

aten = torch.ops.aten

_logger = logger_of("dtensor")

MAX_DECOMPOSED = 1024
"""Kinds of calls per mesh of which it is remembered whether a decomposition serves them."""

_STORAGE_OPS = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


def run_without_rule(bound: Bound) -> Any:
    """Return what the operator returns, by its decomposition or on whole tensors.

    Raises UnsupportedOp in strict mode, for random operators without a rule, and for those that
    change storage.
    """
    call, op = bound.call, bound.call.op
    if is_composite(op):  # as it arrives in inference mode: its definition, not a fallback
        return op.decompose(*call.args, **call.kwargs)
    _refuse(bound)
    if changes_shape(op):
        return change_shape(op, call.args, call.kwargs)
    functional = functional_of(op)
    if functional is not None and functional is not op:
        return _via_functional(call, functional)
    if is_strict():
        raise UnsupportedOp(
            f"{op}({_listed(bound)}) has no sharding rule and strict mode allows no fallback; "
            "write one with register_sharding, or redistribute and use to_local()"
        )
    decomposition = None if schema_of(op).is_mutable else decompositions().get(op)
    if decomposition is not None and _decomposes(bound, decomposition):
        # What this raises goes out: ranks that had sent something could not begin anew together.
        with implicit_replication():
            result = decomposition(*call.args, **call.kwargs)
        if result is not NotImplemented:
            _log(bound, "decomposed as torch does it")
            return map_tensors(partial(_wrapped, bound), result)
    _log(bound, "gathered and run whole on every rank")
    return _run_whole(bound)


def _decomposes(bound: Bound, decomposition: Callable[..., Any]) -> bool:
    """Whether torch's decomposition of an operator has all that it needs, found once for a kind.

    It is tried on tensors without data, by which all ranks find the same and send nothing.
    """
    known: Cache[Key, bool] = bound.mesh.cache("decomposed", MAX_DECOMPOSED)
    found = known.get(bound.key)
    if found is None:
        with outside_modes() if has_modes() else nullcontext():
            found = _can_run(bound, decomposition)
        known.put(bound.key, found)
    return found


def _can_run(bound: Bound, decomposition: Callable[..., Any]) -> bool:
    args, kwargs = bound.call.without_data([_without_data(leaf) for leaf in bound.leaves])
    nothing = _SendsNothing()
    add_observer(nothing)
    try:
        with implicit_replication():
            decomposition(*args, **kwargs)
    except DtckptError:
        return False
    except (_NeedsValues, RuntimeError):  # which it has when it runs
        return True
    finally:
        remove_observer(nothing)
    return True


def _without_data(leaf: Tensor) -> Tensor:
    if not isinstance(leaf, Wrapper):
        return leaf.to("meta")
    local = leaf.local
    empty = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return leaf.ordinary(empty, leaf.spec)


class _NeedsValues(Exception):
    """A decomposition came to a collective."""


class _SendsNothing(Observer):
    def before(self, collective: Collective) -> None:
        raise _NeedsValues(str(collective))


def _log(bound: Bound, how: str) -> None:
    if _logger.isEnabledFor(INFO):
        inputs = ", ".join(map(str, bound.specs))
        where = f" at {call_site()}" if _logger.isEnabledFor(DEBUG) else ""
        _logger.info("%s(%s): %s%s", bound.call.op, inputs, how, where)


def _wrapped(bound: Bound, tensor: Tensor) -> Tensor:
    """Return a result, replicated if it is plain, as decompositions leave some."""
    if isinstance(tensor, Wrapper):
        return tensor
    return bound.call.cls(tensor, replicated_spec(bound.mesh, tensor))


def _refuse(bound: Bound) -> None:
    op, listed = bound.call.op, _listed(bound)
    if schema_of(op).name in _STORAGE_OPS:
        raise UnsupportedOp(
            f"{op}({listed}) changes the storage of a DTensor, which has none; use the result of "
            "view() or of a slice, or make a new tensor"
        )
    if op is aten._sparse_coo_tensor_with_dims_and_tensors.default:
        raise UnsupportedOp(
            f"{op}({listed}) makes a sparse tensor, which a DTensor cannot be; use what is dense, "
            "as an embedding with sparse=False"
        )
    if is_random(op) and (functional_of(op) is op or not _reads_tensors(op)):
        raise UnsupportedOp(
            f"{op}({listed}) draws random numbers on each rank alone, which would differ between "
            "replicas; draw them for a DTensor, as by uniform_(), normal_() or random_(), and "
            "compute with those"
        )


def _reads_tensors(op: Op) -> bool:
    arguments = schema_of(op).arguments
    return any(isinstance(arg.type, torch.TensorType) and not arg.is_out for arg in arguments)


def _listed(bound: Bound) -> str:
    return ", ".join(str(spec) for spec in bound.specs[:4])


def _via_functional(call: Call, functional: Op) -> Any:
    op, args, kwargs = call.op, call.args, call.kwargs
    outs = {arg.name for arg in schema_of(op).arguments if arg.is_out}
    given = {name: value for name, value in kwargs.items() if name not in outs}
    result = functional(*args, **given)
    targets = [
        kwargs[argument.name] if argument.name in kwargs else args[position]
        for position, argument in enumerate(schema_of(op).arguments)
        if is_written(argument)
    ]
    if outs and isinstance(result, Tensor) and result.dtype != targets[0].dtype:
        result = _in_dtype_of(targets[0], result, call, functional, given)
    if outs and isinstance(result, tuple) and base_name(functional) in _WITH_PLACES:
        _require_dtypes(op, targets, cast("tuple[Tensor, ...]", result))
    read: list[Tensor] = []
    collect_tensors([*args, *given.values()], read)
    _copy_into(op, targets, [result] if len(targets) == 1 else result, set(map(id, read)))
    if not schema_of(op).returns:
        return None
    return targets[0] if len(targets) == 1 else tuple(targets)


_WITH_PLACES = frozenset(
    ["cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "nanmedian", "sort", "topk"]
)
"""Functions that write elements and their places, and cast neither."""


def _require_dtypes(op: Op, outs: list[Tensor], results: tuple[Tensor, ...]) -> None:
    for out, result in zip(outs, results, strict=True):
        if out.dtype != result.dtype:
            raise RuntimeError(
                f"{op}: Expected out tensor to have dtype {result.dtype}, but got {out.dtype} "
                "instead; pass one of that dtype"
            )


_IN_DTYPE_OF_OUT = frozenset({"sum", "nansum", "prod", "mean", "cumsum", "cumprod"})
"""Functions whose argument ``dtype`` is by default that of ``out=``: the input is cast to it."""

_ROUNDED_TO_OUT = frozenset({"var", "std", "logsumexp"})
"""Functions without that argument, which are computed in the wider one of both dtypes."""


_CAST_TO_OUT = frozenset({"all", "any"})
"""Functions without that argument, whose input is cast to the dtype of ``out=``."""


def _in_dtype_of(
    out: Tensor, result: Tensor, call: Call, functional: Op, kwargs: Mapping[str, Any]
) -> Tensor:
    """Return what torch writes to an ``out=`` of another dtype than the result has without it.

    A result that is cast afterwards has other values: sums of half precision are rounded, and those
    of small integers do not fit. Raises what torch raises where it refuses the dtype of ``out``.
    """
    _refuse_dtype(out, result, call)
    name, args = base_name(functional), call.args
    if name in _IN_DTYPE_OF_OUT and kwargs.get("dtype") is None:
        return functional(*args, **{**kwargs, "dtype": out.dtype})
    if name in _CAST_TO_OUT and args[0].numel() != 1:  # of one element it is asked as it is
        return functional(args[0].to(out.dtype), *args[1:], **kwargs)
    if name == "logsumexp" and result.is_complex() and not out.is_complex():
        return result.real + result.imag.cos().log()  # the logarithm of the sum's real part
    if name in _ROUNDED_TO_OUT:
        source, wide = args[0].dtype, out.dtype.to_real()
        if source.is_floating_point and wide == torch.promote_types(source, wide) != source:
            return functional(args[0].to(wide), *args[1:], **kwargs)
    return result


def _refuse_dtype(out: Tensor, result: Tensor, call: Call) -> None:
    """Raise what the kernel raises for an ``out=`` of this dtype.

    It is asked by small tensors, of two elements a dim as there is no variance of one. Where they
    are refused for another reason, torch's function for tensors without data is asked.
    """
    with outside_modes() if has_modes() else nullcontext():
        error = _refusal(out, out.dtype, call)
        if error is None:
            return
        if _refusal(out, result.dtype, call) is None:
            raise error
    empties = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in call.tensors
    ]
    meta_args, meta_kwargs = call.without_data(empties)
    with suppress(NotImplementedError):
        call.op(*meta_args, **meta_kwargs)


def _refusal(out: Tensor, dtype: torch.dtype, call: Call) -> RuntimeError | None:
    """Return what the kernel raises for small tensors and an empty ``out=`` of some dtype."""
    small = [
        torch.empty(0, dtype=dtype, device=t.device)
        if t is out
        else torch.zeros([2 if size else 0 for size in t.shape], dtype=t.dtype, device=t.device)
        for t in call.tensors
    ]
    args, kwargs = call.replaced(small)
    try:
        call.op(*args, **kwargs)
    except RuntimeError as error:
        return error
    except (TypeError, ValueError, IndexError):
        return RuntimeError("the arguments do not fit to small tensors")
    return None


def _copy_into(op: Op, targets: Any, values: Any, read: set[int]) -> None:
    """Write results; of a tensor that is ``read``, too, the shape stays, as torch has it."""
    for target, value in zip(targets, values, strict=True):
        if not isinstance(target, Tensor):
            _copy_into(op, target, value, read)
            continue
        if isinstance(target, Wrapper) and target.shape != value.shape and id(target) not in read:
            resize(target, value)
        if target.shape == value.shape:
            target.copy_(value)
            write_past(target, value)
        elif isinstance(target, Wrapper) or target.numel():
            raise PlacementError(
                f"{op}: its result has the shape {list(value.shape)}, but the tensor to write it "
                f"to has {list(target.shape)}; make that one of the shape of the result"
            )
        # A plain tensor without elements is what operators make for results they do not return.


def _run_whole(bound: Bound) -> Any:
    mesh, op = bound.mesh, bound.call.op
    if mesh.has_rank and mesh.get_coordinate() is None:
        return _run_outside(bound)
    whole_specs = [spec.replicated() for spec in bound.specs]
    if schema_of(op).is_mutable:
        for leaf in bound.leaves:
            refuse_lost_writes(op, leaf)
    _warn_once(bound, whole_specs)
    outs = only_written(bound.call)
    wholes = [
        # The operator gives it the shape of the result, which the local part need not have.
        torch.empty(0, dtype=spec.dtype, device=leaf.device)
        if id(leaf) in outs and isinstance(leaf, Wrapper)
        else redistribute_locals([regular_local(leaf)], [(spec, whole_spec)])[0]
        for leaf, spec, whole_spec in zip(bound.leaves, bound.specs, whole_specs, strict=True)
    ]
    whole_args, whole_kwargs = bound.call.replaced(wholes)
    result = op(*whole_args, **whole_kwargs)
    if schema_of(op).is_mutable:
        _write_back(bound, whole_specs, wholes, outs)
    # A view of what was gathered shares no memory with the tensor that it should be a view of.
    lost = op.is_view and any(
        isinstance(leaf, CopiedView | Irregular)
        or (isinstance(leaf, Wrapper) and whole is not leaf.local)
        for whole, leaf in zip(wholes, bound.leaves, strict=True)
    )
    by_identity = {id(whole): leaf for whole, leaf in zip(wholes, bound.leaves, strict=True)}
    views: list[Tensor] = []

    def wrap(value: Tensor) -> Tensor:
        if id(value) in by_identity:
            return by_identity[id(value)]
        views.append(_wrapped(bound, value))
        return views[-1]

    wrapped = map_tensors(wrap, result)
    if lost:
        call = ViewCall(op, bound.call.args[1:], bound.call.kwargs)
        mark_copied(views, bound.leaves[0], call, whole_specs[0].placements)
    return wrapped


def _run_outside(bound: Bound) -> Any:
    """Return results without values, for a rank that is not in the mesh."""
    op, metas = bound.call.op, output_metas(bound)
    if metas is None:
        raise PlacementError(
            f"this rank is not in mesh {bound.mesh.layout_mesh}, and the shape of what {op} "
            "returns depends on values that it does not have; call it on ranks of the mesh only"
        )
    placements = (Replicate(),) * bound.mesh.ndim
    specs = [
        None if m is None else spec_of(bound.mesh, placements, m.shape, m.stride, m.dtype)
        for m in metas
    ]
    made = [s and bound.call.cls(torch.empty(0, dtype=s.dtype), s) for s in specs]
    returns = schema_of(op).returns
    if len(returns) != 1:
        return tuple(made)
    return made[0] if isinstance(returns[0].type, torch.TensorType) else made


def _write_back(
    bound: Bound, whole_specs: list[DTensorSpec], wholes: list[Tensor], outs: set[int]
) -> None:
    for leaf, spec, whole_spec, whole in zip(
        bound.leaves, bound.specs, whole_specs, wholes, strict=True
    ):
        if not isinstance(leaf, Wrapper):
            continue
        if id(leaf) in outs:
            _copy_into(bound.call.op, [leaf], [_wrapped(bound, whole)], set())
        elif whole is not leaf.local or isinstance(leaf, Irregular):
            store(leaf, redistribute_local(whole, whole_spec, spec))


def _warn_once(bound: Bound, whole_specs: list[DTensorSpec]) -> None:
    op = bound.call.op
    warned: set[Op] = bound.mesh.state("warned", set[Op])
    if op in warned:
        return
    warned.add(op)
    pairs = zip(bound.specs, whole_specs, strict=True)
    num_bytes = sum(
        math.prod(spec.shape) * spec.dtype.itemsize for spec, whole in pairs if spec is not whole
    )
    warnings.warn(
        f"{op} has no sharding rule: its inputs are gathered ({num_bytes} bytes this time) and it "
        "runs whole on every rank. Write a rule with register_sharding; strict mode makes this an "
        "error. Said once per operator and mesh",
        stacklevel=2,
    )
