"""Views, slices, joins and rearrangements: values on every rank against one device."""

# pyright: reportUnknownLambdaType=false
# One line per operator.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Placement, Ragged, Replicate, Shard

from ..rank_meshes import collectives, run_on_mesh, scattered
from .op_cases import Case, check_on

aten = torch.ops.aten


def _complex(a: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(a * 2).conj().resolve_conj()) + a


VIEWS = [
    Case("movedim", lambda a: a.movedim(0, -1) + a.mT.swapaxes(0, 1).movedim(0, 2), ((3, 3, 3),)),
    Case("flatten_inner", lambda a: a.flatten(1) * 2, ((5, 2, 3),)),
    Case("unflatten", lambda a: a.unflatten(0, (2, 3)) * 2, ((6, 3),)),
    Case("view_uneven", lambda a: a.view(3, 5).view(5, 3).view(-1).view(15, 1), ((5, 3),)),
    Case("expand_ones", lambda a: a.expand(2, 4, 3) * 2, ((4, 1),)),
    Case("squeeze_dims", lambda a: a.squeeze((0, 2)) + a.squeeze(0).squeeze(1), ((1, 5, 1),)),
    Case("ones_moved", lambda a: a.view(2, 1, 4) * a.view(1, 8).view(2, 1, 4), ((1, 8, 1),)),
    Case("ones_joined", lambda a: a.reshape(8) + a.flatten() * a.view(4, 2).view(-1), ((2, 1, 4),)),
    Case("diagonal", lambda a: a.diagonal(1, 2, 0) * 2, ((3, 5, 4),)),
    Case("diag_embed", lambda a: a.diag_embed(1, 0, -1), ((5, 3),)),
    Case("unfold", lambda a: a.unfold(0, 2, 3) * a.unfold(-3, 3, 4).sum(), ((7, 3, 2),)),
    Case("as_strided", lambda a: a.as_strided((3, 2), (2, 3), 1) * 2, ((5, 3),)),
    Case("complex", _complex, ((5, 3, 2),)),
    Case("view_dtype", lambda a: a.view(torch.uint8).view(torch.int16), ((5, 3),), grad=False),
    Case("reshape_alias", lambda a: aten._reshape_alias(a, (3, 5), (5, 1)), ((5, 3),)),
    Case("copies", lambda a: torch.t_copy(a).view(5, 3) + aten.view_copy(a, (5, 3)), ((3, 5),)),
    Case("copies_list", lambda a: [*aten.split_copy(a, 2), *aten.unbind_copy(a, 1)], ((5, 3),)),
    Case("lift_fresh", lambda a: aten.lift_fresh(a) * 2, ((5, 3),), grad=False),
]

SLICES = [
    Case("slice", lambda a: a[1:4] * 2, ((5, 3),)),
    Case("slice_step", lambda a: a[1::2, ::3] * 2, ((7, 5),)),
    Case("slice_empty", lambda a: a[2:2] * 2, ((5, 3),)),
    Case("narrow", lambda a: a.narrow(0, 1, 3).narrow(1, 0, 2) * 2, ((5, 3),)),
    Case("slices_meet", lambda a: a[1:] - a[:-1], ((5, 3),)),
    Case("select", lambda a: a[1] * a[:, -1].sum() + a.select(1, 2).unsqueeze(1)[0], ((5, 3),)),
    Case("select_bool", lambda a: (a > 2)[3] | (a > 1)[0], ((5, 3),), grad=False),
    Case("split", lambda a: [t * 2 for t in a.split((1, 3, 0, 1))], ((5, 3),)),
    Case(
        "chunk",
        lambda a: [t * 2 for t in a.chunk(2)] + [t * 2 for t in a.tensor_split(4)],
        ((5, 3),),
    ),
    Case("hsplit", lambda a: [*a.hsplit((1,)), *a.vsplit((2, 3))], ((5, 3),)),
    Case("unbind", lambda a: [t * 2 for t in a.unbind()], ((5, 3),)),
    Case("slice_scatter", lambda a, b: a.slice_scatter(b, 0, 1, 4) * 2, ((5, 3), (3, 3))),
    Case("slice_scatter_step", lambda a, b: a.slice_scatter(b, 1, 0, 5, 2), ((3, 5), (3, 3))),
    Case("select_scatter", lambda a, b: a.select_scatter(b, 0, -2) * 2, ((5, 3), (3,))),
    Case("diagonal_scatter", lambda a, b: a.diagonal_scatter(b, 1) * 2, ((5, 3), (2,))),
    Case(
        "strided_scatter",
        lambda a, b: a.as_strided_scatter(b, (2, 2), (3, 2)),
        ((5, 3), (2, 2)),
        grad=False,
    ),
    Case("pad", lambda a: F.pad(a, (1, 2, 3, 1)) * 2, ((5, 3),)),
    Case("pad_value", lambda a: F.pad(a, (0, 0, 2, -1), value=1.5) * 2, ((5, 3),)),
    Case("crop", lambda a: F.pad(a, (-1, 0, -2, 1)) * 2, ((5, 3),)),
]

JOINS = [
    Case("cat", lambda a, b: torch.cat([a, b]) * 2, ((5, 3), (2, 3))),
    Case("cat_inner", lambda a, b: torch.cat([a, b, a], 1) * 2, ((3, 5), (3, 2))),
    Case("cat_empty", lambda a, b: torch.cat([a, b]) * 2, ((0,), (5, 3)), grad=False),
    Case("stack", lambda a, b: torch.stack([a, b], -1) * 2, ((5, 3), (5, 3))),
    Case(
        "stacks", lambda a, b: torch.hstack([a, b]) + torch.column_stack([a, b]), ((5, 3), (5, 3))
    ),
    Case("dstack", lambda a, b: torch.dstack([a, b]) * 2, ((5, 3), (5, 3))),
    Case("block_diag", lambda a, b: torch.block_diag(a, b) * 2, ((3, 2), (5,))),
    Case(
        "meshgrid", lambda a, b: [t * 2 for t in torch.meshgrid(a, b, indexing="ij")], ((5,), (3,))
    ),
    Case("repeat_interleave", lambda a: a.repeat_interleave(2, 0) * 2, ((5, 3),)),
    Case("repeat_some", lambda a: a.repeat_interleave(torch.tensor([2, 0, 1]), 1), ((5, 3),)),
    Case("flip", lambda a: a.flip(0, 1) + a.fliplr().flipud(), ((5, 3),)),
    Case("roll", lambda a: a.roll(2, 0) + a.roll((1, -1), (0, 1)) + a.roll(4), ((5, 3),)),
    Case("rot90", lambda a: [a.rot90() * 2, a.rot90(2), a.rot90(-1, (1, 0))], ((5, 3),)),
    Case("repeat", lambda a: a.repeat(2, 1, 3) * 2 + a.tile((2, 1, 3)), ((5, 3),)),
    Case("repeat_none", lambda a: a.repeat(0, 2) * 2, ((5, 3),), grad=False),
    Case("tril", lambda a: a.tril(-1) + a.triu(1) * 2, ((5, 4),)),
    Case("tril_in_place", lambda a: (a * 2).tril_(1), ((2, 3, 5),)),
    Case("new", lambda a: [a.new_zeros(3, 2), a.new_full((4,), 2), a.new_ones(5, 3)], ((5, 3),)),
    Case("trace", lambda a: a.trace() * 2, ((5, 3),), grad=False),
]

CASES = VIEWS + SLICES + JOINS


@pytest.mark.parametrize("part", range(4))
def test_one_axis(part: int) -> None:
    check_on((4,), CASES[part::4], 4)


@pytest.mark.parametrize("part", range(4))
def test_two_axes(part: int) -> None:
    check_on((2, 2), CASES[part::4], 1, special=2)


IDENTITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(1, 8),
    "reshape": lambda x: x.reshape(1, 8),
    "view_as": lambda x: x.view_as(x),
    "flatten": lambda x: x.flatten(1),
    "unflatten and back": lambda x: x.unflatten(1, (2, 4)).flatten(1),
    "unsqueeze and back": lambda x: x.unsqueeze(1).squeeze(1),
}


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("cuts", [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0)] * 2])
def test_identities_keep_a_cut_of_a_dim_of_size_one(name: str, cuts: list[Placement]) -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.arange(8.0).view(1, 8), mesh, cuts)
        with collectives() as seen:
            view: Any = IDENTITIES[name](tensor)
        assert seen == []
        assert view.placements == tensor.placements
        view.zero_()  # and its memory
        assert not tensor.to_local().any()

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize(
    ("shape", "cut", "target", "placement"),
    [
        ((1, 8), 0, (8,), Ragged(0, (8, 0))),
        ((8, 1), 1, (2, 4), Ragged(0, (2, 0))),
        ((2, 1, 4), 1, (8,), Ragged(0, (8, 0))),
        ((1, 8), 0, (8, 1), Shard(1)),
        ((1, 1, 8), 1, (1, 8), Shard(0)),
        ((1, 1), 0, (1,), Shard(0)),
    ],
)
def test_a_dim_of_size_one_lies_on_one_rank_in_every_shape(
    shape: tuple[int, ...], cut: int, target: tuple[int, ...], placement: Placement
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)

    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(whole, mesh, [Shard(cut)])
        with collectives() as seen:
            view = tensor.view(target)
        assert seen == []
        assert view.placements == (placement,)
        assert torch.equal(view.full_tensor(), whole.view(target))

    run_on_mesh((2,), body)
