"""Every collective is seen, by those who ought to, with the bytes that it moves."""

from __future__ import annotations

import ast
import itertools
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dtckpt.dtensor import DeviceMesh, Layout, Partial, Replicate, Shard
from dtckpt.dtensor.comm.collectives import (
    broadcast,
    start_all_gather,
    start_all_to_all,
)
from dtckpt.dtensor.comm.reductions import all_reduce, reduce_scatter
from dtckpt.dtensor.comm.traffic import (
    BY_THREAD,
    Collective,
    Observer,
    add_observer,
    remove_observer,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.redistribute import explain

from ...forked import run_forked
from ..rank_meshes import gather_alike, run_on_mesh, scattered

functional: Any = torch.ops.c10d_functional
native: Any = torch.ops._c10d_functional
c10d: Any = torch.ops.c10d

MANY = 1 << 18
"""Elements that are worth an all-reduce of the backend."""


def test_nothing_leaves_a_rank_but_through_the_one_function() -> None:
    """Calls of methods of groups stand in functions that ``issue`` is given, and nowhere else."""
    root = Path(__file__).parents[3]
    found = [
        f"{path.name}:{line}"
        for path in [*root.glob("dtensor/**/*.py"), *root.glob("checkpoint/*.py")]
        if path.name != "torch_private.py"  # whose two functions count as such calls themselves
        for line in _loose_calls(ast.parse(path.read_text()))
    ]
    assert not found


def test_loose_calls_are_found() -> None:
    """The search above sees what it is for."""
    for code, is_loose in (
        ("peers.group.allreduce([x]).wait()", True),
        ("dist.all_reduce(x)", True),
        ("issue('a', peers, lambda: peers.group.allreduce([x]))", False),
        ("def call():\n    return group.send([x])\nissue('a', peers, call)", False),
        ("def call():\n    return group.send([x])\ncall()", True),
        ("peers.group.rank()", False),
        ("gather_into(peers.group, received, sent)", True),
        ("issue('a', peers, lambda: gather_into(peers.group, received, sent))", False),
    ):
        assert bool(_loose_calls(ast.parse(code))) == is_loose, code


_COLLECTIVE = re.compile(r"_?(all|reduce|broadcast|gather|scatter|send|recv|barrier).*")


_OF_TORCH_PRIVATE = ("gather_into", "scatter_reduced")


def _loose_calls(tree: ast.Module) -> list[int]:
    issues = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "issue"
    ]
    names = {arg.id for call in issues for arg in call.args if isinstance(arg, ast.Name)}
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    given = {id(node) for part in (*issues, *functions) for node in ast.walk(part)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_collective(node.func) and id(node) not in given
    ]


def _is_collective(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in _OF_TORCH_PRIVATE
    return (
        isinstance(called, ast.Attribute)
        and ast.unparse(called.value).lower().endswith(("group", "everyone", "dist", "_c10d"))
        and _COLLECTIVE.fullmatch(called.attr) is not None
    )


def test_every_kind_is_counted_with_its_bytes() -> None:
    def body(mesh: DeviceMesh) -> None:
        peers = mesh.peers((0,))
        here = mesh.get_local_rank()
        with CommDebugMode() as comm:
            gather_alike(torch.ones(5), peers)
            all_reduce(torch.ones(MANY), "sum", peers)
            broadcast(torch.ones(7), 1, peers)
            sizes = [10, 20, 30]
            start_all_to_all(
                torch.zeros(60, dtype=torch.uint8),
                sizes,
                torch.zeros(3 * sizes[here], dtype=torch.uint8),
                [sizes[here]] * 3,
                peers,
            ).wait()
        assert comm.get_comm_counts() == {
            "all_gather": 1,
            "all_reduce": 1,
            "broadcast": 1,
            "all_to_all": 1,
        }
        assert comm.get_total_counts() == 4
        received, sent = comm.get_comm_bytes(), comm.get_comm_bytes(sent=True)
        assert received["all_gather"] == sent["all_gather"] == 2 * 20
        assert received["all_reduce"] == sent["all_reduce"] == 2 * 4 * MANY * 2 // 3
        assert (sent["broadcast"], received["broadcast"]) == ((56, 0) if here == 1 else (0, 28))
        assert sent["all_to_all"] == 60 - sizes[here]
        assert received["all_to_all"] == 2 * sizes[here]

    run_on_mesh((3,), body)


def test_as_much_is_received_as_is_sent() -> None:
    layouts = [
        ([Shard(0), Replicate()], [Shard(1), Shard(0)]),
        ([Partial(), Shard(1)], [Shard(0), Replicate()]),
        ([Shard(1), Shard(1)], [Replicate(), Shard(0)]),
        ([Partial(), Partial()], [Replicate(), Shard(1)]),
    ]

    def body(mesh: DeviceMesh) -> list[tuple[int, int]]:
        moved: list[tuple[int, int]] = []
        for source, target in layouts:
            tensor = scattered(torch.ones(5, 7), mesh, source)
            with CommDebugMode() as comm:
                tensor.redistribute(placements=target)
            total = sum(comm.get_comm_bytes(sent=True).values())
            moved.append((total, sum(comm.get_comm_bytes().values())))
        return moved

    for ranks in zip(*run_on_mesh((2, 2), body), strict=True):
        assert sum(sent for sent, _ in ranks) == sum(received for _, received in ranks) > 0


def test_explain_tells_what_is_then_counted() -> None:
    ways = [Shard(0), Shard(1), Replicate(), Partial()]
    layouts = list(itertools.product(ways, ways))

    def body(mesh: DeviceMesh) -> None:
        for source, target in itertools.product(layouts, layouts):
            tensor = scattered(torch.ones(5, 7), mesh, source)
            told = explain(tensor.global_layout, Layout(mesh.layout_mesh, target, (5, 7)))
            with CommDebugMode() as comm:
                tensor.redistribute(placements=target)
            received, sent = comm.get_comm_bytes(), comm.get_comm_bytes(sent=True)
            rank = mesh.get_rank()
            assert sum(received.values()) == told.received_bytes[rank], (source, target)
            assert sum(sent.values()) == told.sent_bytes[rank], (source, target)

    run_on_mesh((2, 2), body)


def test_reduce_scatter_counts_however_it_is_done() -> None:
    def body(mesh: DeviceMesh) -> None:
        here = mesh.get_local_rank()
        for mine, others in ((6, 6), (6 + 4 * here, 10 - 4 * here), (1 << 19, 1 << 19)):
            sizes = (mine, others) if here == 0 else (others, mine)
            with CommDebugMode() as comm:
                made = reduce_scatter([torch.ones(n) for n in sizes], "sum", mesh.peers((0,)))
            assert made.shape == (mine,)
            assert made.unique().tolist() == [2]
            # What it receives: the terms of the other rank.
            assert sum(comm.get_comm_bytes().values()) == 4 * mine

    run_on_mesh((2,), body)


def test_keys_are_texts_and_operators_of_torch() -> None:
    def body(mesh: DeviceMesh) -> None:
        with CommDebugMode() as comm:
            gather_alike(torch.ones(5), mesh.peers((0,)))
        counts = comm.get_comm_counts()
        for key in (
            "all_gather",
            functional.all_gather_into_tensor,
            native.all_gather_into_tensor,
            native.all_gather_into_tensor.default,
            c10d._allgather_base_,
            c10d.allgather_.default,
        ):
            assert counts[key] == 1, key
            assert key in counts
            assert counts.get(key) == 1
        for other in (functional.all_reduce, native.reduce_scatter_tensor, "broadcast"):
            assert counts[other] == 0
            assert other not in counts
            assert counts.get(other, 7) == 7
        assert counts == {"all_gather": 1}
        for wrong in (torch.ops.aten.mm, "all_gathr", 3):
            with pytest.raises(KeyError, match="all_to_all"):
                counts[wrong]

    run_on_mesh((2,), body)


def test_threads_do_not_see_each_other() -> None:
    turn = threading.Barrier(2)

    def body(mesh: DeviceMesh) -> int:
        peers = mesh.peers((0,))
        if mesh.get_local_rank() == 1:
            turn.wait()
            gather_alike(torch.ones(1), peers)
            turn.wait()
            return 0
        with CommDebugMode() as comm:
            turn.wait()
            gather_alike(torch.ones(1), peers)
            turn.wait()
        return comm.get_total_counts()

    assert run_on_mesh((2,), body) == [1, 0]
    assert not BY_THREAD


class Deep(torch.autograd.Function):
    """Runs a backward pass within its backward, so deep that autograd goes on in other threads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, at_end: Any) -> torch.Tensor:
        ctx.depth, ctx.at_end = depth, at_end
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if ctx.depth == 0:
            ctx.at_end()
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                made: Any = Deep.apply(x, ctx.depth - 1, ctx.at_end)
                made.sum().backward()
        return grads[0], None, None


def test_threads_of_autograd_work_for_the_one_that_called_it() -> None:
    def body(mesh: DeviceMesh) -> None:
        threads: list[int] = []

        def at_end() -> None:
            threads.append(threading.get_ident())
            gather_alike(torch.ones(1), mesh.peers((0,)))

        with CommDebugMode() as comm:
            x = torch.ones(1, requires_grad=True)
            made: Any = Deep.apply(x, 70, at_end)
            made.sum().backward()
        assert threads[0] != threading.get_ident()
        assert comm.get_comm_counts(phase="backward") == {"all_gather": 1}
        at_end()
        assert comm.get_total_counts() == 1

    run_on_mesh((2,), body)


def test_an_observer_hears_before_and_after_and_may_refuse() -> None:
    class Watching(Observer):
        def __init__(self) -> None:
            self.heard: list[tuple[str, str]] = []

        def before(self, collective: Collective) -> None:
            self.heard.append(("before", collective.kind))

        def issued(self, collective: Collective) -> None:
            self.heard.append(("issued", collective.kind))

        def waited(self, collective: Collective, seconds: float) -> None:
            assert seconds > 0
            self.heard.append(("waited", collective.kind))

    class Refusing(Observer):
        def before(self, collective: Collective) -> None:
            raise PermissionError(collective.kind)

    def body(mesh: DeviceMesh) -> None:
        peers, watching, refusing = mesh.peers((0,)), Watching(), Refusing()
        sent, received = torch.zeros(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        add_observer(watching)
        work = start_all_gather(received, sent, peers)
        assert watching.heard == [("before", "all_gather"), ("issued", "all_gather")]
        work.wait()
        work.wait()
        assert watching.heard[2:] == [("waited", "all_gather")]
        add_observer(refusing)
        with pytest.raises(PermissionError):
            start_all_gather(received, sent, peers)
        remove_observer(refusing)
        remove_observer(watching)

    run_on_mesh((2,), body)


PROGRAM = """
import sys, torch, torch.distributed as dist, torch.distributed._functional_collectives as fc
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor import init_device_mesh, DTensor
import dtckpt.dtensor as ours
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torchs = dist.device_mesh.init_device_mesh("cpu", (2,))
theirs = distribute_tensor(torch.ones(4, 3), torchs, [Shard(0)])
mesh = init_device_mesh("cpu", (2,))
tensor = DTensor.from_local(torch.ones(2, 3), mesh, [ours.Shard(0)], shape=(4, 3))
with CommDebugMode() as comm:
    dist.all_reduce(torch.ones(6))
    fc.all_gather_tensor(torch.ones(5), 0, dist.group.WORLD).sum()
    dist.broadcast(torch.ones(2), 1)
    outs = torch.empty(4)
    splits = [3, 1] if rank == 0 else [1, 3]
    dist.all_to_all_single(outs, torch.ones(4), splits, splits)
    dist.barrier()
counts = comm.get_comm_counts()
kinds = ["all_reduce", "all_gather", "broadcast", "all_to_all", "barrier"]
assert counts == dict.fromkeys(kinds, 1), counts
received = comm.get_comm_bytes()
assert received["all_reduce"] == 24, received
assert received["all_gather"] == 20, received
assert received["broadcast"] == (8 if rank == 0 else 0), received
assert received["all_to_all"] == 4, received
with CommDebugMode() as comm:
    theirs.redistribute(placements=[Replicate()])
funcol = torch.ops.c10d_functional
assert comm.get_comm_counts()[funcol.all_gather_into_tensor] == 1, comm.get_comm_counts()
assert comm.get_comm_bytes()["all_gather"] == 24
with CommDebugMode() as comm:
    tensor.full_tensor()
assert comm.get_total_counts() == 1, comm.get_comm_counts()
assert sum(comm.get_comm_bytes().values()) == 24
path = comm.log_comm_debug_tracing_table_to_file(sys.argv[3] + "/log.txt")
assert path.endswith(f"log.rank{rank}.txt"), path
print("done")
dist.destroy_process_group()
"""


def test_collectives_of_torch_are_counted_beside(tmp_path: Path) -> None:
    rest = (str(tmp_path / "store"), str(tmp_path))
    ends = run_forked(
        {str(rank): (PROGRAM, str(rank), *rest) for rank in range(2)}, tmp_path, imports=""
    )
    assert [ends[str(rank)].out.strip() for rank in range(2)] == ["done", "done"], ends
