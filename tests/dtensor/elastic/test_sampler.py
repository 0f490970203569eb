"""Batches are a function of seed and position."""

from __future__ import annotations

import pytest

from dtckpt.dtensor import PlacementError
from dtckpt.dtensor.elastic import ElasticSampler


def test_each_epoch_has_every_element_once() -> None:
    sampler = ElasticSampler(10, seed=4)
    drawn = [i for _ in range(10) for i in sampler.next(3).tolist()]
    epochs = [tuple(drawn[i : i + 10]) for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 3
    assert (sampler.position, sampler.epoch) == (30, 3)
    assert sampler.next(25).shape == (25,)
    assert ElasticSampler(10, seed=5).next(10).tolist() != list(epochs[0])
    assert ElasticSampler(10, seed=4, shuffle=False).next(12).tolist() == [*range(10), 0, 1]


def test_it_goes_on_from_its_state() -> None:
    one, other = ElasticSampler(7, seed=-1), ElasticSampler(7, seed=-1)
    one.next(9)
    other.load_state_dict(one.state_dict())
    assert one.next(9).tolist() == other.next(9).tolist()
    for length, seed in ((8, -1), (7, 0)):
        with pytest.raises(PlacementError, match="would draw other batches"):
            ElasticSampler(length, seed=seed).load_state_dict(one.state_dict())
    with pytest.raises(PlacementError, match="has no batches"):
        ElasticSampler(0, seed=0)
    with pytest.raises(PlacementError, match="1 or more"):
        one.next(0)
