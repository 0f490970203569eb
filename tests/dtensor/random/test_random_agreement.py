"""Ranks that seed torch at different places, or not at all: no rank draws other numbers unheard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, rand, random
from dtckpt.dtensor.random import seed_notes as agreeing
from dtckpt.dtensor.random import seeds
from dtckpt.dtensor.random.draws import draws_of
from dtckpt.errors import PlacementError

from ..rank_meshes import run_on_mesh

T = TypeVar("T")

_c10d: Any = dist


class Job:
    """Ranks that are threads, each with its own generator of torch, and a store for all of them."""

    def __init__(self) -> None:
        self.store = _c10d.HashStore()
        self.store.set_timeout(timedelta(seconds=0.3))
        self._own = threading.local()
        self._turn = threading.Barrier(2)

    def seed(self, seed: int) -> None:
        """Do what ``torch.manual_seed`` does, for this rank alone."""
        self._own.seed, self._own.ticket = seed, seed * 1000

    def use_generator(self) -> None:
        """Draw a plain random number on this rank."""
        self._own.ticket += 1

    def initial_seed(self) -> int:
        """Stand for ``torch.initial_seed``."""
        return getattr(self._own, "seed", 7)

    def take_ticket(self) -> int:
        """Return the next number of this rank's generator."""
        self._own.ticket = getattr(self._own, "ticket", 7000) + 1
        return self._own.ticket

    def together(self) -> None:
        """Wait for the other rank."""
        self._turn.wait(60)

    def run(self, body: Callable[[DeviceMesh], T]) -> list[T]:
        """Run two ranks."""

        def with_generator(mesh: DeviceMesh) -> T:
            draws_of(mesh)._take_ticket = self.take_ticket  # pyright: ignore[reportPrivateUsage]
            return body(mesh)

        return run_on_mesh((2,), with_generator)


def is_start(seed: int, ticket: int | None) -> bool:
    """Whether a ticket of a `Job` is the first one after a seed."""
    return ticket == seed * 1000 + 1


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    monkeypatch.setattr(agreeing, "job_store", lambda: made.store)
    monkeypatch.setattr(seeds, "_is_start", is_start)
    monkeypatch.setattr(torch, "initial_seed", made.initial_seed)
    return made


def drawn(mesh: DeviceMesh) -> list[float]:
    made: Tensor = rand(4, device_mesh=mesh)
    return made.to_local().tolist()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rank_that_is_seeded_alone_draws_nothing_until_all_are_given_a_seed(job: Job) -> None:
    def body(mesh: DeviceMesh) -> list[list[float]]:
        found = [drawn(mesh)]
        if mesh.get_rank() == 1:
            job.seed(99)
            with pytest.raises(PlacementError, match=r"this rank \(1\), and ranks \[0\]"):
                drawn(mesh)
            for _ in range(2):
                with pytest.raises(PlacementError, match=r"none are drawn until all of them call"):
                    drawn(mesh)
            with pytest.raises(PlacementError, match="none are drawn"):
                random.get_rng_state(mesh)
        else:
            drawn(mesh)
        job.together()
        random.manual_seed(5, mesh)
        return [*found, drawn(mesh), drawn(mesh)]

    first, second = job.run(body)
    assert first == second


def test_a_rank_that_has_given_up_is_not_waited_for(job: Job) -> None:
    job.store.set_timeout(timedelta(seconds=0.2))

    def body(mesh: DeviceMesh) -> None:
        drawn(mesh)
        if mesh.get_rank() == 1:
            job.seed(99)
            with pytest.raises(PlacementError, match="have not done so"):
                drawn(mesh)
            job.store.set_timeout(timedelta(minutes=20))
        job.together()
        job.seed(6)
        with pytest.raises(PlacementError, match=r"ranks \[1\] .* gave up|none are drawn"):
            drawn(mesh)
        random.set_rng_state({"seed": 3, "offset": 2}, mesh)
        assert random.get_rng_state(mesh) == {"seed": 3, "offset": 2}

    job.run(body)


def test_a_generator_set_back_unnoticed_on_one_rank_is_an_error_soon(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreeing, "SOON", timedelta(seconds=0.2))
    job.store.set_timeout(timedelta(minutes=20))

    def body(mesh: DeviceMesh) -> list[float]:
        drawn(mesh)
        drawn(mesh)
        job.seed(7)
        if mesh.get_rank() == 1:
            for _ in range(5):  # the numbers that come now have not been seen
                job.use_generator()
            drawn(mesh)
        else:
            with pytest.raises(PlacementError, match="same seed"):
                drawn(mesh)
        job.together()
        random.manual_seed(7, mesh)
        return drawn(mesh)

    first, second = job.run(body)
    assert first == second


def test_ranks_that_seed_alike_begin_anew(job: Job) -> None:
    def body(mesh: DeviceMesh) -> list[list[float]]:
        job.store.set_timeout(timedelta(minutes=2))
        job.seed(7)
        found = [drawn(mesh), drawn(mesh)]
        for _ in range(3):
            job.seed(7)
            assert [drawn(mesh), drawn(mesh)] == found
        job.seed(8 + mesh.get_rank())  # that of the first rank counts
        other = drawn(mesh)
        assert other not in found
        return [*found, other]

    first, second = job.run(body)
    assert first == second


def test_ranks_that_go_back_to_different_draws_all_raise(job: Job) -> None:
    job.store.set_timeout(timedelta(minutes=2))

    def body(mesh: DeviceMesh) -> None:
        drawn(mesh)
        drawn(mesh)
        job.seed(7)
        if mesh.get_rank() == 1:
            job.use_generator()
        for match in ("not alike", "did not agree"):
            with pytest.raises(PlacementError, match=match):
                drawn(mesh)

    job.run(body)


def test_a_wait_that_is_broken_off_breaks_the_random_numbers_of_the_mesh(job: Job) -> None:
    class Impatient:
        def __getattr__(self, name: str) -> Any:
            return getattr(job.store, name)

        def wait(self, *_: object) -> None:
            raise KeyboardInterrupt

    def body(mesh: DeviceMesh) -> None:
        drawn(mesh)
        job.together()
        job.seed(9)
        with pytest.raises(KeyboardInterrupt):
            drawn(mesh)
        with pytest.raises(PlacementError, match="manual_seed"):
            drawn(mesh)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(agreeing, "job_store", Impatient)
        job.run(body)
