"""Collectives compared across ranks before they are issued."""

# pyright: reportPrivateUsage=false
# To have two ranks find something at the same moment.

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, Partial, Shard
from dtckpt.dtensor.comm.collectives import Peers, all_gather, broadcast, start_all_to_all
from dtckpt.dtensor.comm.reductions import all_reduce
from dtckpt.dtensor.debug import checking_collectives
from dtckpt.dtensor.debug.checking import CollectiveChecker
from dtckpt.errors import CollectiveMismatch
from tests.forked import Ended, run_forked
from tests.python import run_python
from tests.ranks import RanksFailed, run_ranks

from ..rank_meshes import rank_mesh, scattered

SHORT = timedelta(seconds=2)
LONG = timedelta(minutes=10)
"""What is found before it: nobody waits so long for the ranks of a test."""
MANY = 1 << 18
"""Elements that are worth an all-reduce of the backend."""
_c10d: Any = dist


def run_checked(
    shape: tuple[int, ...],
    body: Callable[[DeviceMesh], Any],
    timeout: timedelta = timedelta(seconds=60),
) -> list[Any]:
    """Run ``body(mesh)`` on ranks that are threads, with all their collectives compared."""
    store, groups = _c10d.HashStore(), _c10d.HashStore()

    def run(rank: int, world: dist.ProcessGroup) -> Any:
        mesh = rank_mesh(groups, shape, rank, world)
        with checking_collectives(store=store, timeout=timeout):
            return body(mesh)

    size = 1
    for n in shape:
        size *= n
    return run_ranks(size, run)


def mismatches(failed: RanksFailed, ranks: set[int]) -> list[str]:
    """Return the texts of the errors, after asserting that just these ranks raised them."""
    assert set(failed.errors) == ranks, failed
    for error in failed.errors.values():
        assert type(error) is CollectiveMismatch, error
    return [str(failed.errors[rank]) for rank in sorted(failed.errors)]


def line_of(marker: str) -> str:
    """Return ``file:line`` of the line of this file that ends with a comment."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if line.endswith(f"# {marker}"):
            return f"{Path(__file__).name}:{number} "
    raise AssertionError(marker)


def test_equal_collectives_pass() -> None:
    def body(mesh: DeviceMesh) -> list[float]:
        whole = torch.arange(12.0).reshape(4, 3)
        found: list[float] = []
        for placements in ([Shard(0), Partial()], [Partial(), Shard(1)], [Shard(1), Shard(0)]):
            tensor = scattered(whole, mesh, placements)
            found.append(float(tensor.full_tensor().sum()))
        return found

    assert run_checked((2, 2), body) == [[66.0] * 3] * 4


def test_different_collectives_name_ranks_and_lines() -> None:
    def body(mesh: DeviceMesh) -> None:
        peers = mesh.peers((0,))
        if mesh.get_local_rank() == 2:
            broadcast(torch.ones(4), 0, peers)  # sends
        else:
            all_gather(torch.ones(4), [(4,)] * 4, peers)  # gathers

    with pytest.raises(RanksFailed) as failed:
        run_checked((4,), body, LONG)
    for text in mismatches(failed.value, {0, 1, 2, 3}):
        assert re.search(rf"ranks 0, 1, 3: all_gather\(16\) at .*{line_of('gathers')}", text), text
        assert re.search(
            rf"rank 2: broadcast\(16 from group rank 0\) at .*{line_of('sends')}", text
        ), text
    assert all(error.ranks == (2,) for error in failed.value.errors.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["size", "dtype", "reduction"])
def test_different_terms_are_found(what: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        odd = mesh.get_local_rank() == 1
        tensor = torch.ones(MANY + (odd and what == "size"))
        if odd and what == "dtype":
            tensor = tensor.int()
        all_reduce(tensor, "product" if odd and what == "reduction" else "sum", mesh.peers((0,)))

    with pytest.raises(RanksFailed) as failed:
        run_checked((2,), body)
    texts = mismatches(failed.value, {0, 1})
    assert texts[0] == texts[1]


def test_sizes_of_an_exchange_have_to_fit() -> None:
    def body(mesh: DeviceMesh) -> None:
        me = mesh.get_local_rank()
        sends = [0, 0, 0]
        sends[(me + 1) % 3] = 8
        expects = [0, 0, 0]
        expects[(me + 2) % 3] = 8 if me != 1 else 4
        sent = torch.zeros(8, dtype=torch.uint8)
        received = torch.zeros(sum(expects), dtype=torch.uint8)
        start_all_to_all(sent, sends, received, expects, mesh.peers((0,))).wait()

    with pytest.raises(RanksFailed) as failed:
        run_checked((3,), body)
    for text in mismatches(failed.value, {0, 1, 2}):
        assert "rank 0 sends 8 bytes to rank 1, which expects 4" in text


def test_a_rank_that_leaves_is_named_at_once() -> None:
    def body(mesh: DeviceMesh) -> None:
        all_reduce(torch.ones(2), "sum", mesh.peers((0,)))  # together
        if mesh.get_local_rank() != 1:
            all_reduce(torch.ones(2), "sum", mesh.peers((0,)))

    with pytest.raises(RanksFailed) as failed:
        run_checked((3,), body, LONG)
    assert {0, 2} <= set(failed.value.errors)
    text = str(failed.value.errors[0])
    assert "rank 1 will not come any more" in text
    assert "rank 1 has left checking_collectives(); its last collective was all_to_all" in text
    assert line_of("together") in text


def test_an_exception_of_another_rank_is_told() -> None:
    def body(mesh: DeviceMesh) -> None:
        peers = mesh.peers((0,))
        all_reduce(torch.ones(2), "sum", peers)
        if mesh.get_local_rank() == 0:
            raise KeyError("lr")
        all_reduce(torch.ones(2), "sum", peers)

    with pytest.raises(RanksFailed) as failed:
        run_checked((2,), body)
    assert type(failed.value.errors[0]) is KeyError
    assert "rank 0 has left by KeyError: 'lr'" in str(failed.value.errors[1])


def test_ranks_that_wait_for_each_other_in_a_circle_are_found_before_the_deadline() -> None:
    def body(mesh: DeviceMesh) -> None:
        order = [(0,), (1,)] if mesh.get_coordinate() in ((0, 0), (1, 1)) else [(1,), (0,)]
        for axes in order:
            all_reduce(torch.ones(2), "sum", mesh.peers(axes))

    with pytest.raises(RanksFailed) as failed:
        run_checked((2, 2), body, LONG)
    texts = mismatches(failed.value, {0, 1, 2, 3})
    assert any("can only come after it" in text for text in texts)


def test_a_rank_at_a_collective_over_another_group_is_named() -> None:
    def body(mesh: DeviceMesh) -> None:
        axes = (0,) if mesh.get_coordinate() == (0, 0) else (1,)
        all_reduce(torch.ones(2), "sum", mesh.peers(axes))  # astray

    with pytest.raises(RanksFailed) as failed:
        run_checked((2, 2), body, LONG)
    texts = mismatches(failed.value, {0, 1})  # 2 and 3 have met, and left
    assert texts[0] == texts[1]
    assert "rank 0 is at all_to_all over ranks 0, 2, " in texts[0] or "rank 1 is at" in texts[0]
    if "rank 0 is at" in texts[0]:
        assert "rank 2 has left checking_collectives(); its last collective was" in texts[0]
        assert f"over ranks 2, 3, number 1 over these and 1 of its own, at {_path()}" in texts[0]
    assert line_of("astray") in texts[0]


def _path() -> str:
    return str(Path(__file__))


def test_a_rank_that_does_something_else_is_named_at_the_deadline() -> None:
    ready, missed = threading.Barrier(2), threading.Event()

    def body(mesh: DeviceMesh) -> None:
        peers = mesh.peers((0,))
        ready.wait(60)
        all_reduce(torch.ones(2), "sum", peers)  # before
        if mesh.get_local_rank() == 0:
            missed.wait(60)
        try:
            all_reduce(torch.ones(2), "sum", peers)
        finally:
            missed.set()

    with pytest.raises(RanksFailed) as failed:
        run_checked((2,), body, SHORT)
    texts = mismatches(failed.value, {0, 1})  # the late one, too, when it comes
    assert texts[0] == texts[1]
    assert "rank 0 did not come within 2 s" in texts[0]
    assert line_of("before") in texts[0]


def test_a_slow_rank_is_waited_for() -> None:
    waiting = threading.Event()

    def body(mesh: DeviceMesh) -> float:
        if mesh.get_local_rank() == 0:
            waiting.wait(60)
        waiting.set()
        return float(all_reduce(torch.ones(1), "sum", mesh.peers((0,))))

    assert run_checked((2,), body) == [2.0, 2.0]


def test_groups_over_other_ranks_are_told_apart() -> None:
    """On both rows at once, rank 1 of one group is not rank 1 of the other."""
    begun = threading.Event()

    def body(mesh: DeviceMesh) -> float:
        row = 0 if mesh.get_coordinate()[0] == 0 else 1  # type: ignore[index]
        total = torch.zeros(())
        for step in range(5):
            if row and step == 0:
                begun.wait(60)  # the rows are not at the same step
            total = all_reduce(torch.ones(1 + row), "sum", mesh.peers((1,))).sum()
            begun.set()
        return float(total)

    assert run_checked((2, 2), body) == [2.0, 2.0, 4.0, 4.0]


def test_saves_and_loads_work_under_it(tmp_path: Path) -> None:
    def body(mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        whole = torch.arange(64.0).reshape(8, 8)
        dcp.save({"w": scattered(whole, mesh, [Shard(0)])}, tmp_path / "c", process_group=group)
        target = {"w": scattered(torch.zeros(8, 8), mesh, [Shard(1)])}
        dcp.load(target, tmp_path / "c", process_group=group, read_once=True)
        assert torch.equal(target["w"].full_tensor(), whole)
        dcp.async_save(target, tmp_path / "d", process_group=group).result()

    run_checked((3,), body)


def test_keys_do_not_pile_up() -> None:
    store = _c10d.HashStore()
    numbers: list[int] = []

    def run(rank: int, world: dist.ProcessGroup) -> None:
        peers = Peers(world, (0, 1))
        with checking_collectives(store=store):
            for step in range(40):
                all_reduce(torch.ones(1), "sum", peers)
                if rank == 0 and step in (9, 39):
                    numbers.append(store.num_keys())

    run_ranks(2, run)
    assert numbers[1] <= numbers[0] + 4, numbers


def test_blocks_that_follow_one_another_do_not_meet() -> None:
    store = _c10d.HashStore()

    def run(rank: int, world: dist.ProcessGroup) -> None:
        peers = Peers(world, (0, 1))
        for size in (1, 2):
            with checking_collectives(store=store):
                all_reduce(torch.ones(size), "sum", peers)

    run_ranks(2, run)


def test_who_finds_it_second_says_what_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = threading.Barrier(2)
    told = CollectiveChecker._told_missing

    def at_once(checker: CollectiveChecker, *args: Any) -> Any:
        text, ranks = told(checker, *args)
        found.wait(30)
        return f"{text} (by rank {checker._rank})", ranks

    monkeypatch.setattr(CollectiveChecker, "_told_missing", at_once)

    def body(mesh: DeviceMesh) -> None:
        if mesh.get_local_rank() < 2:
            all_reduce(torch.ones(2), "sum", mesh.peers((0,)))

    with pytest.raises(RanksFailed) as failed:
        run_checked((3,), body, SHORT)
    first, second = mismatches(failed.value, {0, 1})
    assert first == second


def test_without_a_store_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="pass store="), checking_collectives():
        pass


PROGRAM = """
import sys, threading, torch, torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from dtckpt.dtensor import init_device_mesh, DeviceMesh, DTensor, Shard, Replicate
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
x.full_tensor()
if sys.argv[3] == "diverge" and rank == 1:
    x = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(6,))
x.full_tensor()
if sys.argv[3] == "threads":
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    begun = [[threading.Event() for _ in range(20)] for _ in range(2)]
    def work(i):
        mesh = DeviceMesh("cpu", [0, 1], groups=[groups[i]])
        for k in range(20):
            if i == rank and k < 2:
                begun[1 - i][k].wait()  # on either rank another thread comes first
            begun[i][k].set()
            x = DTensor.from_local(torch.full((2 + i,), k), mesh, [Shard(0)], shape=(4 + 2 * i,))
            assert x.full_tensor().tolist() == [k] * (4 + 2 * i)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
print("done", rank)
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Two ranks for each way in which a job goes."""
    folder = tmp_path_factory.mktemp("jobs")
    return run_forked(
        {
            f"{how}-{rank}": (PROGRAM, str(rank), str(folder / f"{how}-store"), how)
            for how in ("agree", "diverge", "threads")
            for rank in range(2)
        },
        folder,
        imports="import torch.distributed, dtckpt.dtensor as d; d.DTensor, d.init_device_mesh",
        env={"DTCKPT_CHECK_COLLECTIVES": "1", "DTCKPT_CHECK_SECONDS": "60"},
    )


@pytest.mark.parametrize("how", ["agree", "diverge", "threads"])
def test_environment_checks_a_whole_job(jobs: dict[str, Ended], how: str) -> None:
    ranks = [jobs[f"{how}-{rank}"] for rank in range(2)]
    if how != "diverge":
        assert [rank.out.strip() for rank in ranks] == ["done 0", "done 1"], ranks
        return
    assert ranks[1].code != 0
    assert "CollectiveMismatch" in ranks[1].errors, ranks
    assert "<string>:12 in <module>" in ranks[1].errors


def test_environment_takes_only_yes_and_no() -> None:
    env = {**os.environ, "DTCKPT_CHECK_COLLECTIVES": "maybe"}
    run = run_python("-c", "import dtckpt.dtensor.comm.traffic", env=env)
    assert "DTCKPT_CHECK_COLLECTIVES is 0 or 1, got 'maybe'" in run.stderr
