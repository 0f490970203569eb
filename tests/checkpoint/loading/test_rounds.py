"""What a load costs between ranks and at the store: rounds, files that are opened, plans."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.loading import filling
from dtckpt.checkpoint.loading.destinations import Destinations
from dtckpt.checkpoint.reading.read_plan import plan_reads
from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard
from dtckpt.errors import CheckpointError, LayoutMismatch
from dtckpt.storage import FaultyStore, MemoryStore, Store

from ...dtensor.rank_meshes import rank_mesh
from ...ranks import RanksFailed, run_ranks
from ..failures import Sabotage

_c10d: Any = dist

SIZE = 2
OWN = ["load: read manifest", "load: plan", "load: read"]
"""The rounds of a load in which each rank reads for itself."""

Make = Callable[[int, DeviceMesh, float], dict[str, Any]]


class Plain:
    """An object whose state is one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


class Watched:
    """Two ranks that save and load, with the rounds of each and the files that it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = SIZE) -> None:
        self.sabotage = Sabotage(monkeypatch)
        self.store = MemoryStore()
        self.size = size
        self.stores: dict[int, FaultyStore] = {}
        self._hub = _c10d.HashStore()

    def save(self, make: Make) -> None:
        """Save what ``make`` returns for every rank."""

        def body(rank: int, group: Any) -> None:
            self.sabotage.arm(rank, None)
            mesh = rank_mesh(self._hub, (self.size,), rank, group)
            dcp.save(make(rank, mesh, 1.0), self.store, process_group=group)

        run_ranks(self.size, body)

    def load(
        self, make: Make, *, url: str | None = None, **options: Any
    ) -> list[tuple[list[str], set[str], Any]]:
        """Load into it; return the rounds of each rank, the files it opened, and its state."""
        hub = _c10d.HashStore()

        def body(rank: int, group: Any) -> tuple[list[str], set[str], Any]:
            mesh = rank_mesh(hub, (self.size,), rank, group)
            self.sabotage.arm(rank, None)
            store = self.stores[rank] = FaultyStore(self.store, [])
            store.url = url or store.url
            state = make(rank, mesh, 0.0)
            dcp.load(state, store, process_group=group, **options)
            return self.sabotage.phases[rank], self.opened(rank), state

        return run_ranks(self.size, body)

    def opened(self, rank: int) -> set[str]:
        """Return the data files of which a rank has asked for anything."""
        return {call.name for call in self.stores[rank].calls if call.name.startswith("data/")}


def rows(rank: int, mesh: DeviceMesh, value: float, dim: int = 0) -> dict[str, Any]:
    """Values, a plain tensor of each rank and a sharded one."""
    local = torch.full((2, 4) if dim == 0 else (4, 2), value)
    return {
        "sharded": DTensor.from_local(local, mesh, [Shard(dim)], shape=(4, 4)),
        f"own{rank}": torch.full((3,), value),
        "step": value,
        "list": [value, {"x": value}],
        "rng": dcp.PerRank({"seed": value + rank}),
    }


def columns(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
    """The same, cut along the other dim."""
    return rows(rank, mesh, value, dim=1)


def replicated(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
    """Tensors that all ranks hold, in two files once they are saved."""
    return {
        f"t{i}": DTensor.from_local(torch.full((30,), value), mesh, [Replicate()]) for i in range(4)
    }


def module(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
    """A module that has memory where it is saved, and none where it is loaded."""
    made = torch.nn.Linear(200, 200, device="cpu" if value else "meta")
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, value)
    return {"module": made}


@pytest.mark.parametrize("make", [rows, columns])
@pytest.mark.parametrize("url", [None, "s3://bucket/run"], ids=["local", "object store"])
def test_a_load_takes_three_rounds(
    monkeypatch: pytest.MonkeyPatch, make: Make, url: str | None
) -> None:
    ranks = Watched(monkeypatch)
    ranks.save(rows)
    for rank, (rounds, _, state) in enumerate(ranks.load(make, url=url)):
        # Where reading is dear and a block would be read by both, they may read for each other.
        shares = make is columns and url is not None
        assert (rounds == OWN) is not shares
        assert state["step"] == 1.0
        assert state["list"] == [1.0, {"x": 1.0}]
        assert state["rng"].value == {"seed": 1.0 + rank}
        assert state["sharded"].to_local().unique().tolist() == [1.0]


def test_ranks_agree_on_the_end_where_code_of_users_has_a_part_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_object(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        return {"object": Plain(value)} if rank == 0 else {}

    def with_mapping(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        return {"mapping": UserDict({"x": value})} if rank == 1 else {}

    for make in (with_object, with_mapping, module):
        ranks = Watched(monkeypatch)
        ranks.save(make)
        for rounds, _, _ in ranks.load(make):
            assert rounds == [*OWN, "load: restore"]
    assert ranks.load(module)[0][2]["module"].weight.device.type == "cpu"


def test_ranks_look_again_before_they_read_only_where_one_has_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        return {"step": value} | ({"new": value} if rank else {})

    ranks = Watched(monkeypatch)
    ranks.save(rows)
    with pytest.raises(RanksFailed) as failed:
        ranks.load(other)
    errors = failed.value.errors
    assert len(errors) == SIZE
    assert len(set(map(str, errors.values()))) == 1
    assert all(type(error) is LayoutMismatch for error in errors.values())
    assert "load: check failed on rank 1: " in str(errors[0])
    assert "Missing in the checkpoint: new" in str(errors[0])
    assert ranks.sabotage.phases[0] == [*OWN[:2], "load: check"]
    for rounds, _, state in ranks.load(other, strict=False):
        assert rounds == OWN
        assert state["step"] == 1.0


def test_a_rank_opens_the_files_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Watched(monkeypatch)
    ranks.save(rows)
    files = {info.name for info in ranks.store.list("data")}
    assert len(files) == SIZE
    opened = [opened for _, opened, _ in ranks.load(rows)]
    assert [len(names) for names in opened] == [1, 1]
    assert set.union(*opened) == files
    assert [opened for _, opened, _ in ranks.load(columns)] == [files, files]


@pytest.mark.parametrize("make", [replicated, columns], ids=["broadcast", "exchange"])
def test_a_rank_opens_no_file_that_others_read_for_it(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """What one rank wrote is read by that rank alone if the others get it from there."""
    size = 4
    ranks = Watched(monkeypatch, size)

    def one_file(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        return {"w": torch.full((64,), value)}

    def wanted(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        if make is replicated:
            return {"w": torch.full((64,), value)}
        local = torch.full((16,), value)
        return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=(64,))}

    ranks.save(one_file)
    monkeypatch.setattr(filling, "MIN_TIMES_ASKED", 100 if make is replicated else 1.25)
    found = ranks.load(wanted, read_once=True)
    assert sum(bool(opened) for _, opened, _ in found) == 1
    assert all(
        (s["w"] if make is replicated else s["w"].to_local()).unique() == 1 for *_, s in found
    )
    assert found[0][0][:4] == [*OWN[:2], "load: check", "load: read"]


@pytest.mark.parametrize("read_once", [False, True])
def test_reads_are_planned_once(monkeypatch: pytest.MonkeyPatch, read_once: bool) -> None:
    """Also those of tensors without memory, which get it after the plan was made."""
    planned: list[int] = []
    real = plan_reads

    def plan(data: Any, wants: Any) -> Any:
        wants = list(wants)
        if wants:
            planned.append(threading.get_ident())
        return real(data, wants)

    ranks = Watched(monkeypatch)
    ranks.save(module)
    monkeypatch.setattr(filling, "plan_reads", plan)
    for _, _, state in ranks.load(module, read_once=read_once):
        assert state["module"].weight.unique().tolist() == [1.0]
    assert len(planned) == len(set(planned))


def test_ranks_of_other_checkpoints_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may hold any character: what is told of it is not cut."""
    store = MemoryStore()
    store.url = "in-process://a\nb"
    dcp.save({"w": torch.ones(3)}, store)
    other = MemoryStore()

    def load(rank: int, group: Any) -> None:
        target: Store = other if rank else store
        dcp.load({"w": torch.zeros(3)}, target, process_group=group)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(SIZE, load)
    assert {type(error) for error in failed.value.errors.values()} <= {
        LayoutMismatch,
        CheckpointError,
    }
    assert "rank 0 has in-process://a\nb" in str(failed.value.errors[0])


class Own(dcp.PerRank):
    """Made by a call of its own."""

    def __init__(self, seed: float) -> None:
        super().__init__({"seed": seed}, "keep")


def test_no_code_of_users_runs_after_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        return {"rng": Own(value + rank)}

    ranks = Watched(monkeypatch)
    ranks.save(make)
    for rank, (rounds, _, state) in enumerate(ranks.load(make)):
        assert rounds == OWN
        assert type(state["rng"]) is Own
        assert state["rng"].value == {"seed": 1.0 + rank}


def errors_of(load: Callable[[], object]) -> list[BaseException]:
    """Return what each rank has raised."""
    with pytest.raises(RanksFailed) as failure:
        load()
    return [failure.value.errors[rank] for rank in range(SIZE)]


def test_what_fails_before_an_exchange_is_told_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, received = Watched(monkeypatch), Destinations.received

    def without_memory(self: Destinations, names: Any) -> Any:
        if self.held["sharded"].device_mesh.get_rank() == 1:
            raise MemoryError("there is none")
        return received(self, names)

    ranks.save(rows)
    monkeypatch.setattr(Destinations, "received", without_memory)

    def shared(rank: int, mesh: DeviceMesh, value: float) -> dict[str, Any]:
        return {"sharded": columns(rank, mesh, value)["sharded"]}

    for error in errors_of(lambda: ranks.load(shared, read_once=True, strict=False)):
        assert "load: read failed on rank 1: MemoryError: there is none" in str(error)


@pytest.mark.parametrize("read_once", [False, True])
def test_a_device_that_is_none_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, read_once: bool
) -> None:
    ranks = Watched(monkeypatch)
    ranks.save(module)
    for error in errors_of(lambda: ranks.load(module, read_once=read_once, device="nonsense")):
        assert "load: plan failed on ranks 0-1: RuntimeError: " in str(error)
        assert isinstance(error, CheckpointError)
        assert error.overwritten == ()
