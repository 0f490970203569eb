"""Tensor subclasses and other kinds of tensors that are distributed, or refused on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    HeadTail,
    Partial,
    Placement,
    PlacementError,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
)
from tests.dtensor.rank_meshes import run_on_mesh

ONE, TWO = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(6, 4) * 2


def made_of(first: torch.Tensor, second: torch.Tensor) -> Any:
    """Return a tensor of a subclass, whose elements are those of two others."""
    return TwoTensor(first.clone(), second.clone())


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
        [Ragged(0, (5, 1)), Shard(0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("source", [0, None])
def test_parts_of_a_subclass_are_of_the_subclass(
    placements: list[Placement], source: int | None
) -> None:
    def body(mesh: DeviceMesh) -> None:
        is_source = source is None or mesh.get_rank() == 0
        given = made_of(ONE, TWO) if is_source else made_of(-ONE, -TWO)
        made = distribute_tensor(nn.Parameter(given), mesh, placements, src_data_rank=source)
        local: Any = made.to_local()
        plain = distribute_tensor(ONE, mesh, placements)
        assert (type(local), made.shape, made.requires_grad) == (TwoTensor, ONE.shape, True)
        assert local.a.equal(plain.to_local())
        assert local.b.equal(2 * plain.to_local())
        tripled: Any = made.detach() * 3
        local = tripled.to_local()
        assert local.b.equal(6 * plain.to_local())
        assert given.a.equal(ONE if is_source else -ONE), "the argument is not written"

    run_on_mesh((2, 2), body)


def test_memory_of_a_part_is_its_own() -> None:
    def body(mesh: DeviceMesh) -> None:
        given = made_of(ONE, TWO)
        local: Any = distribute_tensor(given, mesh, [Replicate()]).to_local()
        local.a.zero_()
        assert given.a.equal(ONE)

    run_on_mesh((2,), body)
    run_on_mesh((1,), body)


def test_what_only_the_class_could_send_is_refused_on_all_ranks() -> None:
    def body(mesh: DeviceMesh) -> None:
        made = distribute_tensor(made_of(ONE, TWO), mesh, [Shard(0)])
        for call in (made.full_tensor, lambda: made.redistribute(placements=[Shard(1)])):
            with pytest.raises(PlacementError, match="the subclass TwoTensor"):
                call()
        for placement in (Partial(), HeadTail(0)):
            with pytest.raises(PlacementError, match="slices of its own"):
                distribute_tensor(made_of(ONE, TWO), mesh, [placement])
        assert distribute_tensor(ONE, mesh, [Shard(0)]).full_tensor().equal(ONE)

    run_on_mesh((2,), body)


def test_numbers_of_a_subclass_are_read() -> None:
    def body(mesh: DeviceMesh) -> None:
        made: Any = distribute_tensor(made_of(ONE, TWO), mesh, [Shard(0)])
        assert made.sum().item() == ONE.sum().item()
        assert (made > 22).any().item()
        assert not (made > 23).any().item()

    run_on_mesh((2,), body)


class Opaque(torch.Tensor):
    """A wrapper that does not tell what it consists of."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        make: Any = torch.Tensor
        return make._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(ONE, 1.0, 0, torch.qint8)


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([ONE, ONE])


KINDS: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("sparse", lambda: ONE.to_sparse()),
    ("sparse", lambda: ONE.to_sparse_csr()),
    ("quantized", quantized),
    ("nested", nested),
    ("of a subclass without __tensor_flatten__", lambda: Opaque(ONE)),
]
IDS = ["coo", "csr", "quantized", "nested", "opaque"]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("kind", "make"), KINDS, ids=IDS)
@pytest.mark.parametrize("on", [(0, 1, 2), (0,), (1, 2)], ids=str)
def test_kinds_of_tensors_that_are_not_distributed(
    kind: str, make: Callable[[], torch.Tensor], on: tuple[int, ...]
) -> None:
    """All ranks raise the same error, whichever of them has such a tensor, and go on."""

    def body(mesh: DeviceMesh) -> str:
        given = make() if mesh.get_rank() in on else ONE
        with pytest.raises(PlacementError, match=kind) as failure:
            distribute_tensor(given, mesh, [Shard(0)])
        assert distribute_tensor(ONE, mesh, [Shard(0)]).full_tensor().equal(ONE)
        return str(failure.value)

    assert len(set(run_on_mesh((3,), body))) == 1


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("kind", "make"), KINDS, ids=IDS)
def test_they_are_refused_where_nothing_is_sent(
    kind: str, make: Callable[[], torch.Tensor]
) -> None:
    mesh = DeviceMesh("cpu", [0, 1], rank=1)
    with pytest.raises(PlacementError, match=kind):
        distribute_tensor(make(), mesh, [Shard(0)], src_data_rank=None)


def test_from_local_takes_parts_of_a_subclass() -> None:
    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        given = made_of(ONE + rank, TWO + rank)
        made = DTensor.from_local(given, mesh, [Replicate()], run_check=True)
        local: Any = made.to_local()
        assert local.a.equal(ONE)
        assert local.b.equal(TWO)

    run_on_mesh((2,), body)
