"""The bare wrapper tensor: a local tensor and the spec of the global one.

Everything below the public ``DTensor`` (planning, dispatch, autograd) knows this base only, and
makes results with the class of the tensors it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.strides import part_fits
from ..mesh.spec import DTensorSpec
from ..torch_private import make_wrapper, quick_constructor, take_bits


class Wrapper(Tensor):
    """A tensor of the global shape that holds this rank's part."""

    __slots__ = ("local", "spec")

    local: Tensor
    """This rank's part; ``_local_tensor`` to torch's readers and constructor."""
    spec: DTensorSpec
    """What the whole is; ``_spec`` to those."""
    _local_tensor: Tensor
    _spec: DTensorSpec
    copied_view: ClassVar[type[Wrapper]]
    """The class of this class's views in name only."""
    awaited: ClassVar[type[Wrapper]]
    """The class of this class's tensors whose local part is still on its way."""
    irregular: ClassVar[type[Wrapper]]
    """The class of this class's tensors whose local part does not fit the strides of the whole."""
    ordinary: ClassVar[type[Wrapper]]
    """The class that results have, of this one and of its variants above."""
    may_be_irregular: bool = False
    """Whether the part of some rank may lie otherwise than the strides say; only it would know."""
    _origin: Any = None
    """Where writes go to besides, if the tensor is such a view (``copied_view.Origin``)."""

    if TYPE_CHECKING:  # the stubs of Tensor's own constructor do not fit

        def __init__(
            self, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False
        ) -> None: ...

    def __new__(
        cls, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False
    ) -> Self:
        make = make_publicly if local_tensor.requires_grad else new_wrapper
        made = make(cls, local_tensor, spec, False)
        if not fits(local_tensor, spec):
            made.__class__ = cls.irregular
        return made.requires_grad_() if requires_grad else made


# The very descriptors of the slots under other names, which cost nothing.
for _name, _slot in (("_local_tensor", Wrapper.local), ("_spec", Wrapper.spec)):
    setattr(Wrapper, _name, _slot)


def fits(local: Tensor, spec: DTensorSpec) -> bool:
    """Return whether a part lies in memory as the strides of the whole promise."""
    if local.layout is not torch.strided or (spec.is_row_major and local.is_contiguous()):
        return True
    if local.ndim != spec.ndim:  # of a rank outside of the mesh
        return True
    return part_fits((local.shape, local.stride()), spec.shape, spec.stride)


def counting_writes() -> AbstractContextManager[None]:
    """Return a context for making views of tensors that count writes, as those must do then too.

    Tensors made in inference mode do not count.
    """
    return torch.inference_mode(False)


def make_publicly(
    cls: type[Any], local_tensor: Tensor, spec: DTensorSpec, requires_grad: bool
) -> Any:
    """Return a new wrapper, by torch's constructor for tensor subclasses."""
    meta = spec.tensor_meta
    made: Any = make_wrapper(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local_tensor.device,
        layout=local_tensor.layout,
        requires_grad=requires_grad,
    )
    if local_tensor.is_conj() or local_tensor.is_neg():
        take_bits(made, local_tensor)
    made.spec = spec
    made.local = local_tensor
    return made


construct: Callable[[type[Any], Tensor, DTensorSpec, bool], Any] = (
    quick_constructor() or make_publicly
)
"""Returns what ``new_wrapper`` does, for a local tensor without an offset, not in inference mode.

It would take over the offset, which differs between ranks, and which operators such as
fill_diagonal_ would add to that of the local tensor once more.
"""

_in_inference = torch.is_inference_mode_enabled


def new_wrapper(cls: type[Any], local: Tensor, spec: DTensorSpec, requires_grad: bool) -> Any:
    """Return a new wrapper of a class."""
    # The constructor warns where the local tensor requires gradients, as none does below autograd.
    make = make_publicly if local.storage_offset() else construct
    if _in_inference() and not local.is_inference():
        with counting_writes():
            return make(cls, local, spec, requires_grad)
    return make(cls, local, spec, requires_grad)


def require_part(name: object, local: Tensor, spec: DTensorSpec) -> None:
    """Raise PlacementError where what an operator made is not this rank's part of ``spec``."""
    if local.dtype is not spec.dtype or local.shape != spec.local_shape:
        refuse_part(name, local, spec)


def refuse_part(name: object, local: Tensor, spec: DTensorSpec) -> NoReturn:
    """Raise PlacementError: an operator made another tensor than its plan says."""
    raise PlacementError(
        f"{name}: this rank got {_told(local.dtype, local.shape)}, expected "
        f"{_told(spec.dtype, spec.local_shape)}, its part of {spec}. The sharding rule of the "
        "operator is wrong: correct it if it is one of register_sharding, else report a defect of "
        "dtckpt, and call the operator on full_tensor() until then"
    )


def _told(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
