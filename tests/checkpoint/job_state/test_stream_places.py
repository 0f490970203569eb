"""Which state a random generator goes on with, as a function of meshes alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.checkpoint import Dealing
from dtckpt.checkpoint.job_state.stream_places import Begins, GoesOn, place_of_stream
from dtckpt.dtensor import Mesh

AXES = ("pp", "dp", "tp", "ep")
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def named_meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(sizes)
    return Mesh(tuple(shape), tuple(draw(st.permutations(AXES))[: len(shape)]))


def places(saved: Mesh, wanted: Mesh, digests: dict[tuple[int, ...], str]) -> list[GoesOn | Begins]:
    found = [
        place_of_stream("cpu", Dealing(saved=saved, wanted=wanted, coordinate=at), digests)
        for at in wanted.coordinates()
    ]
    return [place for place in found if place is not None]


@settings(max_examples=300, deadline=None)
@given(named_meshes(), named_meshes())
def test_ranks_that_differed_never_have_the_same_stream(saved: Mesh, wanted: Mesh) -> None:
    digests = {at: str(at) for at in saved.coordinates()}
    found = places(saved, wanted, digests)
    assert len(set(found)) == wanted.size
    assert len({place.seed & 0xFFFFFFFF for place in found if isinstance(place, Begins)}) == sum(
        isinstance(place, Begins) for place in found
    )


@settings(max_examples=200, deadline=None)
@given(named_meshes())
def test_the_same_mesh_goes_on_as_it_was_however_axes_are_ordered(mesh: Mesh) -> None:
    digests = {at: str(at) for at in mesh.coordinates()}
    assert places(mesh, mesh, digests) == [GoesOn(at) for at in mesh.coordinates()]
    turned = Mesh(mesh.shape[::-1], mesh.axis_names[::-1])
    assert places(mesh, turned, digests) == [GoesOn(at[::-1]) for at in turned.coordinates()]


@settings(max_examples=200, deadline=None)
@given(named_meshes(), named_meshes(), st.data())
def test_what_was_the_same_along_an_axis_stays_the_same(
    saved: Mesh, wanted: Mesh, data: st.DataObject
) -> None:
    alike = data.draw(st.sampled_from(saved.axis_names))
    axis = saved.axis(alike)
    digests = {at: str((*at[:axis], *at[axis + 1 :])) for at in saved.coordinates()}
    found = dict(zip(wanted.coordinates(), places(saved, wanted, digests), strict=True))
    lines: dict[tuple[int, ...], set[object]] = {}
    for at, place in found.items():
        told: object = place
        if isinstance(place, GoesOn):
            told = digests[place.source]
        rest = tuple(i for i, n in zip(at, wanted.axis_names, strict=True) if n != alike)
        lines.setdefault(rest, set()).add(told)
    if saved.shape[axis] > 1:
        assert all(len(told) == 1 for told in lines.values())
    assert len({frozenset(told) for told in lines.values()}) == len(lines)


def test_all_the_same_stays_all_the_same() -> None:
    saved, wanted = Mesh((2,), ("dp",)), Mesh((5,), ("dp",))
    found = places(saved, wanted, {(0,): "a", (1,): "a"})
    assert found == [GoesOn((0,)), GoesOn((1,)), GoesOn((0,)), GoesOn((1,)), GoesOn((0,))]


def test_a_mesh_that_grew_and_one_that_shrank() -> None:
    two, three = Mesh((2,), ("dp",)), Mesh((3,), ("dp",))
    grown = places(two, three, {(0,): "a", (1,): "b"})
    assert grown[:2] == [GoesOn((0,)), GoesOn((1,))]
    assert isinstance(grown[2], Begins)
    assert grown == places(two, three, {(0,): "a", (1,): "b"}), "the same whenever it is loaded"
    assert grown[2] != places(two, three, {(0,): "c", (1,): "b"})[2], "later it begins elsewhere"
    digests = {(0,): "a", (1,): "b", (2,): "c"}
    assert places(three, two, digests) == [GoesOn((0,)), GoesOn((1,))]


def test_an_axis_that_is_new_and_one_that_is_gone() -> None:
    plain, split = Mesh((2,), ("dp",)), Mesh((2, 2), ("dp", "tp"))
    found = places(plain, split, {(0,): "a", (1,): "b"})
    assert [type(place).__name__ for place in found] == ["GoesOn", "Begins"] * 2
    digests = {(0, 0): "a", (0, 1): "b", (1, 0): "c", (1, 1): "d"}
    assert places(split, plain, digests) == [GoesOn((0, 0)), GoesOn((1, 0))]


def test_no_two_of_many_ranks_begin_alike() -> None:
    saved, wanted = Mesh((1,), ("dp",)), Mesh((64, 32, 8), ("pp", "dp", "tp"))
    found = places(saved, wanted, {(0,): "a"})
    seeds = {place.seed & 0xFFFFFFFF for place in found if isinstance(place, Begins)}
    assert len(seeds) == math.prod(wanted.shape) - 1


def test_a_state_that_one_rank_lacked_begins_anew() -> None:
    saved = Mesh((3,), ("dp",))
    found = places(saved, saved, {(0,): "a", (2,): "a"})
    assert [type(place) for place in found] == [GoesOn, Begins, GoesOn]
    assert places(saved, saved, {}) == []


@pytest.mark.parametrize("other", ["cuda", "cuda+1"])
def test_streams_of_one_rank_begin_apart(other: str) -> None:
    saved, wanted = Mesh((1,), ("dp",)), Mesh((2,), ("dp",))
    dealing = Dealing(saved=saved, wanted=wanted, coordinate=(1,))
    assert place_of_stream("cpu", dealing, {(0,): "a"}) != place_of_stream(
        other, dealing, {(0,): "a"}
    )
