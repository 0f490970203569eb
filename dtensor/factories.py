"""New distributed tensors that nobody had whole: every rank makes its own part.

``size`` is given as numbers or as one sequence. ``device_mesh`` defaults to the mesh of the
innermost ``with mesh:``, ``placements`` to Replicate, and ``dtype`` to torch's default. Where
placements are Partial the terms reduce to the values asked for. All raise PlacementError for
placements that do not fit and for layouts that are not strided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from .dtensor import DTensor, resolve_placements
from .geometry.integers import ints
from .mesh.resolving import AnyMesh, resolve_mesh
from .mesh.spec import DTensorSpec, spec_of
from .mesh.torch_layouts import AnyPlacement
from .random import samplers
from .random.counter_rng import Sampler
from .random.filling import check_parameters, drawer, permuter
from .redistribute import redistribute_local, require_commuting
from .tensor.compilers import opaque

Placements = Sequence[AnyPlacement] | None
Size = int | Sequence[int]


@opaque
def zeros(
    *size: Size,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of zeros."""
    spec = _spec("zeros", size, dtype, layout, device_mesh, placements)
    return _made(spec, Tensor.zero_, requires_grad)


@opaque
def ones(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of ones."""
    spec = _spec("ones", size, dtype, layout, device_mesh, placements)
    return _made(spec, lambda local: local.fill_(1), requires_grad)


@opaque
def empty(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of whatever values; replicas may differ until they are written."""
    spec = _spec("empty", size, dtype, layout, device_mesh, placements)
    return DTensor(_empty(spec), spec, requires_grad=requires_grad)


@opaque
def full(
    size: Size,
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of one value, whose kind gives the dtype where none is named."""
    found = torch.full((), fill_value).dtype if dtype is None else dtype
    spec = _spec("full", (size,), found, layout, device_mesh, placements)
    return _made(spec, lambda local: local.fill_(fill_value), requires_grad)


@opaque
def rand(
    *size: Size,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return uniform numbers in [0, 1), the same on every mesh (see ``dtckpt.dtensor.random``)."""
    spec = _spec("rand", size, dtype, layout, device_mesh, placements)
    check_parameters("uniform_", spec.dtype)
    return _drawn(spec, samplers.uniform_of(spec.dtype), requires_grad)


@opaque
def randn(
    *size: Size,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return normal numbers, the same on every mesh (see ``dtckpt.dtensor.random``)."""
    spec = _spec("randn", size, dtype, layout, device_mesh, placements)
    check_parameters("normal_", spec.dtype)
    return _drawn(spec, samplers.normal_of(spec.dtype), requires_grad)


@opaque
def randint(
    *bounds_and_size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return random integers, the same on every mesh: ``randint([low,] high, size)``.

    They are from ``low``, which defaults to 0, up to and without ``high``, int64 unless named.
    """
    if len(bounds_and_size) not in (2, 3):
        raise TypeError(f"randint takes [low,] high and a size, not {bounds_and_size}")
    *bounds, size = bounds_and_size
    low, high = ints((0, *bounds)[-2:], "the bounds of randint")
    spec = _spec("randint", (size,), dtype or torch.int64, layout, device_mesh, placements)
    check_parameters("random_", spec.dtype, low, high)
    return _drawn(spec, samplers.integers(low, high), requires_grad)


@opaque
def randperm(
    n: int,
    *,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a random order of the integers below ``n``, the same on every mesh.

    Each rank puts all of them in order, and keeps its part.
    """
    spec = _spec("randperm", (n,), dtype, layout, device_mesh, placements)
    if n - 1 > _last_integer(dtype):
        raise PlacementError(
            f"randperm: {dtype} does not have all integers below {n}; name a wider dtype"
        )
    return _made(spec, permuter(spec.reduced()), requires_grad)


@opaque
def linspace(
    start: complex | Tensor,
    end: complex | Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return ``steps`` numbers from ``start`` to ``end`` at equal distances.

    Bounds may be tensors without dims, ours too. Each rank makes all numbers, with the bits that
    ``torch.linspace`` gives on one device, and keeps its part.
    """
    bounds = _number(start), _number(end)

    def make(**options: Any) -> Tensor:
        return torch.linspace(*bounds, steps, **options)

    return _sequence("linspace", make, steps, dtype, layout, device_mesh, placements, requires_grad)


@opaque
def logspace(
    start: complex | Tensor,
    end: complex | Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: AnyMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return ``base`` to the powers that ``linspace`` gives; all else is as there."""
    bounds = _number(start), _number(end)

    def make(**options: Any) -> Tensor:
        return torch.logspace(*bounds, steps, base, **options)

    return _sequence("logspace", make, steps, dtype, layout, device_mesh, placements, requires_grad)


def _number(bound: complex | Tensor) -> Any:
    if not isinstance(bound, Tensor):
        return bound
    if bound.ndim:
        raise PlacementError(f"a bound is a number or a tensor of no dims, got {bound.ndim}")
    return bound.item()


def _sequence(
    name: str,
    make: Callable[..., Tensor],
    steps: int,
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: AnyMesh | None,
    placements: Placements,
    requires_grad: bool,
) -> DTensor:
    """Return a tensor of one dim, of which each rank makes all elements and keeps its part."""
    found = make(dtype=dtype, device="meta").dtype
    spec = _spec(name, (steps,), found, layout, device_mesh, placements)
    parts = spec.reduced().parts()

    def write(local: Tensor) -> None:
        if local.is_meta or not local.numel():
            return
        whole = make(dtype=found, device=local.device)
        for held, place in parts:
            local[place.slices].copy_(whole[held.slices])

    return _made(spec, write, requires_grad)


def _last_integer(dtype: torch.dtype) -> float:
    """Return the number up to which a dtype has all integers; -1 where those are not its values."""
    if dtype == torch.bool or dtype.is_complex:
        return -1
    return 2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max


def _spec(
    name: str,
    size: tuple[Size, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: AnyMesh | None,
    placements: Placements,
) -> DTensorSpec:
    if layout != torch.strided:
        raise PlacementError(
            f"{name}: layout={layout} is not supported, only torch.strided; leave it out"
        )
    mesh = resolve_mesh(device_mesh)
    shape = ints(_one_sequence(size), "the size of a tensor")
    ours = resolve_placements(placements, mesh, len(shape))
    require_commuting(ours)
    return spec_of(mesh, ours, shape, None, torch.get_default_dtype() if dtype is None else dtype)


def _one_sequence(size: tuple[Size, ...]) -> Any:
    first = size[0] if len(size) == 1 else size
    return (first,) if isinstance(first, int) else first


def _empty(spec: DTensorSpec) -> Tensor:
    return torch.empty(spec.local_shape, dtype=spec.dtype, device=spec.mesh.device)


def _made(spec: DTensorSpec, write: Callable[[Tensor], object], requires_grad: bool) -> DTensor:
    values = spec.reduced()
    local = _empty(values)
    write(local)
    return DTensor(redistribute_local(local, values, spec), spec, requires_grad=requires_grad)


def _drawn(spec: DTensorSpec, sampler: Sampler, requires_grad: bool) -> DTensor:
    return _made(spec, drawer(spec.reduced(), sampler), requires_grad)
