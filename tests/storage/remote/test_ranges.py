"""Which requests bring which ranges, without making any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.storage.base import ReadRequest
from dtckpt.storage.remote.ranges import Fetch, plan_fetches

DATA = bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtckpt.storage.remote.ranges.FETCH_BYTES", 100)
    monkeypatch.setattr("dtckpt.storage.remote.ranges.REQUEST_BYTES", 10)


def spans(*ranges: tuple[int, int]) -> list[tuple[int, int]]:
    """Return what is fetched for some ranges."""
    requests = [ReadRequest(start, bytearray(stop - start)) for start, stop in ranges]
    return [(fetch.start, fetch.stop) for fetch in plan_fetches(requests)]


def test_neighbours_are_fetched_together() -> None:
    assert spans((0, 20), (20, 40), (40, 60)) == [(0, 60)]
    assert spans((40, 60), (0, 20), (20, 40)) == [(0, 60)]


def test_what_costs_less_than_a_request_is_read_over() -> None:
    assert spans((0, 20), (30, 40)) == [(0, 40)]
    assert spans((0, 20), (31, 40)) == [(0, 20), (31, 40)]


def test_a_fetch_does_not_grow_too_large() -> None:
    assert spans((0, 60), (60, 100)) == [(0, 100)]
    assert spans((0, 60), (60, 101)) == [(0, 60), (60, 101)]
    assert spans((0, 250)) == [(0, 100), (100, 200), (200, 250)]


def test_ranges_may_overlap_and_be_empty() -> None:
    assert spans((0, 50), (10, 20), (5, 60), (7, 7)) == [(0, 60)]
    assert spans((7, 7)) == []


@given(
    ranges=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), max_size=8),
    step=st.integers(1, 120),
)
def test_every_byte_goes_where_it_belongs(ranges: list[tuple[int, int]], step: int) -> None:
    buffers = [bytearray(size) for _, size in ranges]
    requests = [
        ReadRequest(start, buffer) for (start, _), buffer in zip(ranges, buffers, strict=True)
    ]
    left = {request: request.view.nbytes for request in requests}

    def copied(request: ReadRequest, num_bytes: int) -> None:
        left[request] -= num_bytes

    for fetch in plan_fetches(requests):
        while fetch.position < fetch.stop:
            stop = min(fetch.position + step, fetch.stop)
            fetch.take(memoryview(DATA)[fetch.position : stop], copied)
    assert buffers == [DATA[start : start + size] for start, size in ranges]
    assert not any(left.values())


def test_more_than_was_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes more"):
        Fetch(5, 10, position=5).take(memoryview(b"12345678"), lambda _, __: None)
