"""What happens to operators without a rule: decomposed, or gathered and run whole."""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import DtckptError, PlacementError, UnsupportedOp

from ..geometry.placement import Replicate
from ..mesh.modes import implicit_replication, is_strict
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_local, redistribute_locals
from ..tensor.arguments import substituted
from ..tensor.copied_view import CopiedView, mark_copied, refuse_lost_writes
from ..tensor.inplace_views import change_shape, changes_shape, resize
from ..tensor.schemas import Op, functional_of, is_random
from ..tensor.wrapper import Wrapper
from ..torch_private import decompositions, is_composite, schema_of
from .binding import Binding
from .logs import note_fallback
from .metas import output_metas

aten = torch.ops.aten

_STORAGE_OPS = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


def run_without_rule(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], bound: Binding
) -> Any:
    """Return what the operator returns, by its decomposition or on whole tensors.

    Raises UnsupportedOp in strict mode, for random operators without a rule, and for those that
    change storage.
    """
    if is_composite(op):  # as it arrives in inference mode: its definition, not a fallback
        return op.decompose(*args, **kwargs)
    _refuse(op, bound)
    if changes_shape(op):
        return change_shape(op, args, kwargs)
    functional = functional_of(op)
    if functional is not None and functional is not op:
        return _via_functional(op, functional, args, kwargs)
    _refuse_fallback(op, bound)
    decomposition = _decomposition_of(op)
    if decomposition is not None:
        try:
            with implicit_replication():
                result = decomposition(*args, **kwargs)
        except (DtckptError, NotImplementedError):
            result = NotImplemented
        if result is not NotImplemented:
            note_fallback(op, bound, "decomposed as torch does it")
            return _all_wrapped(cls, result, bound)
    note_fallback(op, bound, "gathered and run whole on every rank")
    return _run_whole(cls, op, args, kwargs, bound)


def _all_wrapped(cls: type[Wrapper], result: Any, bound: Binding) -> Any:
    if isinstance(result, Tensor):
        return _wrapped(cls, result, bound)
    if isinstance(result, list | tuple):
        made = [_all_wrapped(cls, item, bound) for item in result]
        return made if isinstance(result, list) else tuple(made)
    return result


def _wrapped(cls: type[Wrapper], tensor: Tensor, bound: Binding) -> Tensor:
    """Return a result of a decomposition, replicated if the decomposition left it plain."""
    if isinstance(tensor, Wrapper):
        return tensor
    placements = (Replicate(),) * bound.mesh.ndim
    spec = spec_of(bound.mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)
    return cls(tensor, spec)


def _refuse(op: Op, bound: Binding) -> None:
    listed = ", ".join(str(spec) for spec in bound.specs[:4])
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


def _refuse_fallback(op: Op, bound: Binding) -> None:
    if is_strict():
        listed = ", ".join(str(spec) for spec in bound.specs[:4])
        raise UnsupportedOp(
            f"{op}({listed}) has no sharding rule and strict mode allows no fallback; write one "
            "with register_sharding, or redistribute and use to_local()"
        )


def _via_functional(
    op: Op, functional: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    outs = {arg.name for arg in schema_of(op).arguments if arg.is_out}
    given = {name: value for name, value in kwargs.items() if name not in outs}
    result = functional(*args, **given)
    targets = [
        kwargs[argument.name] if argument.name in kwargs else args[position]
        for position, argument in enumerate(schema_of(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    _copy_into(op, targets, [result] if len(targets) == 1 else result)
    if not schema_of(op).returns:
        return None
    return targets[0] if len(targets) == 1 else tuple(targets)


def _copy_into(op: Op, targets: Any, values: Any) -> None:
    for target, value in zip(targets, values, strict=True):
        if not isinstance(target, Tensor):
            _copy_into(op, target, value)
            continue
        if isinstance(target, Wrapper) and target.shape != value.shape:
            resize(target, value)
        if target.shape == value.shape:
            target.copy_(value)
            if (
                isinstance(target, Wrapper)
                and target._origin
                and not isinstance(target, CopiedView)
            ):
                target._origin.write(value)
        elif isinstance(target, Wrapper) or target.numel():
            raise PlacementError(
                f"{op}: its result has the shape {list(value.shape)}, but the tensor to write it "
                f"to has {list(target.shape)}; make that one of the shape of the result"
            )
        # A plain tensor without elements is what operators make for results they do not return.


def _decomposition_of(op: Op) -> Callable[..., Any] | None:
    if schema_of(op).is_mutable:
        return None
    return decompositions().get(op)


def _run_whole(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], bound: Binding
) -> Any:
    mesh = bound.mesh
    if mesh.has_rank and mesh.get_coordinate() is None:
        return _run_outside(cls, op, args, kwargs, bound)
    replicated = (Replicate(),) * mesh.ndim
    whole_specs = [spec.with_placements(replicated) for spec in bound.specs]
    if schema_of(op).is_mutable:
        for leaf in bound.leaves:
            refuse_lost_writes(op, leaf)
    _warn_once(op, bound, whole_specs)
    locals_ = [leaf._local_tensor if isinstance(leaf, Wrapper) else leaf for leaf in bound.leaves]
    moves = list(zip(bound.specs, whole_specs, strict=True))
    wholes = [
        redistribute_locals([local], [move])[0] for local, move in zip(locals_, moves, strict=True)
    ]
    whole_args, whole_kwargs = substituted(args, kwargs, wholes)
    result = op(*whole_args, **whole_kwargs)
    if schema_of(op).is_mutable:
        _write_back(bound, whole_specs, wholes)
    # A view of what was gathered shares no memory with the tensor that it should be a view of.
    lost = op.is_view and any(
        isinstance(leaf, Wrapper)
        and (isinstance(leaf, CopiedView) or whole is not leaf._local_tensor)
        for whole, leaf in zip(wholes, bound.leaves, strict=True)
    )
    by_identity = {id(whole): leaf for whole, leaf in zip(wholes, bound.leaves, strict=True)}

    def wrap(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in by_identity:
                return by_identity[id(value)]
            spec = spec_of(mesh, replicated, value.shape, value.stride(), value.dtype)
            made = cls(value, spec)
            if lost:
                mark_copied(made, bound.leaves[0])
            return made
        if isinstance(value, list | tuple):
            return type(value)([wrap(item) for item in value])
        return value

    return wrap(result)


def _run_outside(
    cls: type[Wrapper], op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], bound: Binding
) -> Any:
    """Return results without values, for a rank that is not in the mesh."""
    metas = output_metas(op, args, kwargs, bound)
    if metas is None:
        raise PlacementError(
            f"this rank is not in mesh {bound.mesh.layout_mesh}, and the shape of what {op} "
            "returns depends on values that it does not have; call it on ranks of the mesh only"
        )
    placements = (Replicate(),) * bound.mesh.ndim
    made: list[Any] = []
    for meta in metas:
        if meta is not None:
            spec = spec_of(bound.mesh, placements, meta.shape, meta.stride, meta.dtype)
            made.append(cls(torch.empty(0, dtype=meta.dtype), spec))
        else:
            made.append(None)
    returns = schema_of(op).returns
    if len(returns) != 1:
        return tuple(made)
    return made[0] if isinstance(returns[0].type, torch.TensorType) else made


def _write_back(bound: Binding, whole_specs: list[DTensorSpec], wholes: list[Tensor]) -> None:
    for leaf, spec, whole_spec, whole in zip(
        bound.leaves, bound.specs, whole_specs, wholes, strict=True
    ):
        if isinstance(leaf, Wrapper) and whole is not leaf._local_tensor:
            leaf._local_tensor.copy_(redistribute_local(whole, whole_spec, spec))


def _warn_once(op: Op, bound: Binding, whole_specs: list[DTensorSpec]) -> None:
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
