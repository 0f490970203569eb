"""Checkpoints in the memory of agents: which stay, what they need, what is said of lost ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import Corrupt, NotCommitted, StorageError
from dtckpt.storage import Store, open_store
from dtckpt.storage.peers import job

from ..storage.peers.hosts import Hosts, hosts
from ..waiting import wait_for


@pytest.fixture
def made() -> Iterator[Hosts]:
    """Two hosts."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv(job.FOLDER, f"{name}/agents")
        with hosts(Path(name) / "registry", "a", "b") as made:
            yield made
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before)  # other tests have some for a while


def state(value: float, step: int) -> dict[str, Any]:
    return {"w": torch.full((500, 100), value), "frozen": torch.ones(300, 100), "step": step}


def save(made: Hosts, step: int, host: str = "a", **options: Any) -> None:
    more = {"copies": options.pop("copies", 2)}
    ckpt.save(
        state(float(step), step),
        f"peers://{made.job}/step-{step}",
        no_dist=True,
        storage_options=made.options(host) | more,
        **options,
    )


def loaded(made: Hosts, step: int, host: str) -> float:
    into = state(0.0, 0)
    url = f"peers://{made.job}/step-{step}"
    ckpt.load(into, url, no_dist=True, storage_options=made.options(host))
    assert into["step"] == step
    assert bool((into["frozen"] == 1).all())
    (value,) = into["w"].unique().tolist()
    return value


def steps(made: Hosts, host: str = "b") -> list[int]:
    found = ckpt.committed_steps(f"peers://{made.job}", storage_options=made.options(host))
    return [step.number for step in found]


def test_the_newest_stays_with_what_it_refers_to(made: Hosts) -> None:
    for step in (1, 2, 3):
        save(made, step)
        assert steps(made) == [step]
    base = f"peers://{made.job}/step-3"
    save(made, 4, base=base)
    assert steps(made) == [3, 4]
    assert loaded(made, 4, "b") == 4.0
    save(made, 5)
    assert steps(made) == [5]
    save(made, 5, overwrite=True)
    assert loaded(made, 5, "a") == 5.0
    store = open_store(f"peers://{made.job}", **made.options("b"))
    assert len(list(store.list())) == 2, "a manifest and a file: nothing is left of the others"
    used = {made.peer(host).ask("status")[0]["used_bytes"] for host in "ab"}
    assert used == {sum(info.size for info in store.list())}


def test_a_save_in_the_background_and_one_that_is_called_off(made: Hosts) -> None:
    url, options = f"peers://{made.job}/step-1", made.options("a")
    handle = ckpt.async_save(state(1.0, 1), url, no_dist=True, storage_options=options)
    assert handle.result().total_bytes == 4 * (50000 + 30000)
    second = ckpt.async_save(
        state(2.0, 2), f"peers://{made.job}/step-2", no_dist=True, storage_options=options
    )
    second.cancel()
    assert second.exception() is not None or steps(made) == [2]
    assert loaded(made, steps(made)[-1], "b") == float(steps(made)[-1])


def test_compressed_ones_take_the_room_of_what_is_stored(made: Hosts) -> None:
    """On the host that saves and on the one that holds the copy."""
    save(made, 1, compress="zstd")
    (record,) = ckpt.read_manifest(store_at(made, 1, "b")).files
    assert record.size < 0.1 * record.data_bytes
    for host in ("a", "b"):
        store = store_at(made, 1, host)
        assert [info.size for info in store.list("data")] == [record.size]
        assert not ckpt.verify(store).problems
        assert loaded(made, 1, host) == 1.0
    made.kill("a")
    assert loaded(made, 1, "b") == 1.0


def store_at(made: Hosts, step: int, host: str) -> Store:
    return open_store(f"peers://{made.job}/step-{step}", **made.options(host))


def test_a_lost_file_names_its_host(made: Hosts) -> None:
    save(made, 1, host="b", copies=1)
    made.kill("b")
    with pytest.raises(Corrupt, match=r"data file is missing.*do not answer: b \(127\.0\.0\.1"):
        loaded(made, 1, "a")
    with pytest.raises(Corrupt, match="none of the checkpoints here is whole"):
        ckpt.latest(f"peers://{made.job}", no_dist=True, storage_options=made.options("a"))
    save(made, 2)
    assert loaded(made, 2, "a") == 2.0


def test_no_room_leaves_what_was_there(made: Hosts) -> None:
    save(made, 1)
    large = {"w": torch.zeros(17 << 20)}
    url, options = f"peers://{made.job}/step-2", made.options("a")
    with pytest.raises(StorageError, match=r"bytes are needed, but \d+ of 67108864 are free"):
        ckpt.save(large, url, no_dist=True, storage_options=options)
    assert steps(made) == [1]
    assert loaded(made, 1, "a") == 1.0
    save(made, 3)
    assert steps(made) == [3]


def test_without_agents_nothing_is_there(made: Hosts) -> None:
    url, options = f"peers://{made.job}", made.options("a")
    assert ckpt.latest(url, no_dist=True, storage_options=options) is None
    with pytest.raises(NotCommitted):
        loaded(made, 1, "a")
