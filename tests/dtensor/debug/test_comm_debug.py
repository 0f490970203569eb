"""``CommDebugMode``: what the library sends, counted where it happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.comm.traffic import BY_THREAD
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.debug.comm_reports import json_report
from tests.ranks import run_ranks

from ..rank_meshes import gather_alike, run_on_mesh, scattered

# pyright: reportPrivateUsage=false
# The hooks that must be gone afterwards have no public name in torch.


class Half(nn.Module):
    """A linear layer whose weight is sharded by rows, with its result gathered."""

    def __init__(self, mesh: DeviceMesh, *, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.arange(float(inputs * outputs)).reshape(outputs, inputs)
        self.weight = nn.Parameter(scattered(weight, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight).redistribute(placements=[Replicate()])  # type: ignore[attr-defined]


class Model(nn.Module):
    """Two layers, of which one may be computed again in the backward pass."""

    def __init__(self, mesh: DeviceMesh, *, recompute: bool = False) -> None:
        super().__init__()
        self.first = Half(mesh, inputs=4, outputs=8)
        self.second = Half(mesh, inputs=8, outputs=2)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> Any:
        if self.recompute:
            return self.second(checkpoint(self.hidden, x, use_reentrant=False))
        return self.second(self.hidden(x))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sigmoid()  # which needs its result again


def stepped(mesh: DeviceMesh, *, recompute: bool = False) -> CommDebugMode:
    """One step of the model under the mode."""
    model = Model(mesh, recompute=recompute)
    x = scattered(torch.ones(3, 4), mesh, [Replicate()])
    with CommDebugMode() as comm:
        model(x).sum().backward()
    return comm


def test_modules_and_directions_are_told_apart() -> None:
    comm = run_on_mesh((2,), stepped)[0]
    for module, forward in (("Model", 2), ("Model.first", 1), ("Model.second", 1), ("Global", 2)):
        assert sum(comm.get_comm_counts(module=module, phase="forward").values()) == forward
    # The gradient of the first layer's result is a sum over the ranks, before the layer goes on.
    assert sum(comm.get_comm_counts(module="Model.first", phase="backward").values()) == 1
    assert sum(comm.get_comm_counts(module="Model.second", phase="backward").values()) == 0
    assert sum(comm.get_comm_counts(phase="recomputation").values()) == 0
    assert comm.get_total_counts() == 3
    assert comm.comm_counts == comm.get_comm_counts()
    by_module = comm.comm_module_counts
    assert set(by_module) == {"Global", "Model", "Model.first", "Model.second"}
    assert sum(by_module["Model.first"]["backward"].values()) == 1


def test_what_is_computed_again_is_told_apart() -> None:
    comm = run_on_mesh((2,), lambda mesh: stepped(mesh, recompute=True))[0]
    for phase, count in (("forward", 1), ("recomputation", 1), ("backward", 1)):
        counts = comm.get_comm_counts(module="Model.first", phase=phase)  # type: ignore[arg-type]
        assert sum(counts.values()) == count, phase
    assert comm.get_total_counts() == 4
    entry = json_report(comm._recording, 1)  # pyright: ignore[reportPrivateUsage]
    first = entry["children"][0]["children"][0]
    assert first["fqn"] == "Model.first"
    names = [operation["name"] for operation in first["operations_checkpointing"]]
    assert "aten.mm.default" in names or "aten.addmm.default" in names, names
    assert first["operations_backward"]


def test_parameters_and_their_placements() -> None:
    comm = run_on_mesh((2,), stepped)[1]
    assert comm.get_sharding_info() == {
        "Model.first.weight": (Shard(0),),
        "Model.second.weight": (Shard(0),),
    }
    info = comm.get_parameter_info()
    assert list(info) == ["Model", "Model.first", "Model.second"]
    assert info["Model"] == {}
    assert info["Model.first"]["weight"].shape == (8, 4)
    assert not info["Model.first"]["weight"].requires_grad


def test_table_shows_more_at_every_level() -> None:
    comm = run_on_mesh((2,), stepped)[0]
    tables = [comm.generate_comm_debug_tracing_table(level) for level in range(4)]
    assert "Model.first (Half)" in tables[0]
    assert "bytes received" in tables[0]
    assert "aten" not in tables[0]
    assert "parameter weight: [8, 4] (S(0))" in tables[1]
    assert "test_comm_debug.py:" in tables[1]
    assert "aten.mm.default" in tables[1]
    lines = [set(table.splitlines()) for table in tables]
    assert lines[1] <= lines[2] <= lines[3]
    assert any("aten.t.default" in line for line in lines[3] - lines[2])
    assert comm.generate_comm_debug_tracing_table() == tables[3]


@pytest.mark.parametrize("level", [-1, 4, 1.5, None])
def test_unknown_noise_levels_are_refused(level: Any, tmp_path: Path) -> None:
    comm = CommDebugMode()
    for method, arguments in (
        (comm.generate_comm_debug_tracing_table, ()),
        (comm.generate_json_dump, (tmp_path / "a.json",)),
        (comm.log_comm_debug_tracing_table_to_file, (tmp_path / "a.txt",)),
    ):
        with pytest.raises(ValueError, match="noise_level is one of 0, 1, 2 and 3"):
            method(*arguments, noise_level=level)
    assert not list(tmp_path.iterdir())


def test_files_name_their_rank(tmp_path: Path) -> None:
    def body(mesh: DeviceMesh) -> list[str]:
        comm = stepped(mesh)
        return [
            comm.generate_json_dump(tmp_path / "log.json"),
            comm.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt", noise_level=0),
            comm.generate_chrome_trace(tmp_path / "trace.json"),
        ]

    for rank, paths in enumerate(run_on_mesh((2,), body)):
        assert [Path(path).name for path in paths] == [
            f"log.rank{rank}.json",
            f"log.rank{rank}.txt",
            f"trace.rank{rank}.json",
        ]
        document = json.loads(Path(paths[0]).read_text())
        model = document["children"][0]
        assert (document["fqn"], model["module_type"]) == ("Global", "Model")
        assert [child["fqn"] for child in model["children"]] == ["Model.first", "Model.second"]
        gathered = model["children"][1]["collectives_forward"][0]
        assert gathered["ranks"] == [0, 1]
        assert gathered["received_bytes"] == 3 * 1 * 4
        assert "test_comm_debug.py" in gathered["call_site"]
        assert Path(paths[1]).read_text().startswith("Global\n")
        events = json.loads(Path(paths[2]).read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
        assert len(spans) == 3
        assert all(event["ts"] >= 0 and event["dur"] > 0 for event in spans)
        assert {event["args"]["phase"] for event in spans} == {"forward", "backward"}


def test_without_a_job_files_name_no_rank(tmp_path: Path) -> None:
    comm = CommDebugMode()
    with comm:
        torch.ones(2).add(1)
    path = comm.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt")
    assert path == str(tmp_path / "log.txt")
    assert "aten.add.Tensor([2])" in Path(path).read_text()


def test_saves_and_loads_are_counted(tmp_path: Path) -> None:
    def body(mesh: DeviceMesh) -> tuple[CommDebugMode, CommDebugMode]:
        group = mesh.get_group()
        tensor = scattered(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
        with CommDebugMode() as saving:
            dcp.save({"w": tensor}, tmp_path / "c", process_group=group)
        target = {"w": scattered(torch.zeros(8, 8), mesh, [Shard(1)])}
        with CommDebugMode() as loading:
            dcp.load(target, tmp_path / "c", process_group=group, read_once=True)
        assert float(target["w"].full_tensor().sum()) == 64 * 63 / 2
        return saving, loading

    saving, loading = run_on_mesh((2,), body)[1]
    counts = saving.get_comm_counts()
    assert counts["all_gather"] == 0, "ranks meet without a collective of the group"
    assert counts["agreement"] >= 3
    assert saving.get_comm_bytes()["agreement"] > 0
    assert {seen.collective.agreed for seen in saving.get_collectives()} >= {"save"}
    counts = loading.get_comm_counts()
    assert counts["all_to_all"] == 1
    assert loading.get_comm_bytes()["all_to_all"] >= 64
    assert counts["agreement"] >= 5
    assert counts["all_gather"] == 0
    assert all("test_comm_debug.py" in seen.site for seen in loading.get_collectives())


def test_a_save_in_the_background_is_followed_to_its_end(tmp_path: Path) -> None:
    def body(rank: int, group: Any) -> list[int]:
        with CommDebugMode() as comm:
            handle = dcp.async_save({"w": torch.ones(100)}, tmp_path / "c", process_group=group)
        handle.result()
        last = comm.get_comm_counts()["agreement"]
        with CommDebugMode() as before:
            dcp.save({"w": torch.ones(100)}, tmp_path / "d", process_group=group)
        return [last, before.get_comm_counts()["agreement"]]

    for last, in_front in run_ranks(2, body):
        assert last == in_front, "as many rounds as in the foreground, all of them counted"


def test_entering_again_begins_anew_and_nesting_works() -> None:
    def body(mesh: DeviceMesh) -> None:
        peers = mesh.peers((0,))
        outer, inner = CommDebugMode(), CommDebugMode()
        with outer:
            gather_alike(torch.ones(1), peers)
            with inner:
                gather_alike(torch.ones(1), peers)
            with pytest.raises(RuntimeError, match="entered already"), outer:
                pass
        assert (outer.get_total_counts(), inner.get_total_counts()) == (2, 1)
        with inner:
            pass
        assert inner.get_total_counts() == 0

    run_on_mesh((2,), body)


def test_a_mode_ends_with_an_exception_and_a_module_may_raise() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("x")

    def body(mesh: DeviceMesh) -> None:
        broken, comm = Broken(), CommDebugMode()
        with pytest.raises(KeyError), comm:
            broken(torch.ones(1))
        with comm:
            with pytest.raises(KeyError):
                broken(torch.ones(1))
            gather_alike(torch.ones(1), mesh.peers((0,)))
        assert comm.get_comm_counts(module="Broken") == {}
        assert comm.get_comm_counts(module="Global") == {"all_gather": 1}

    run_on_mesh((2,), body)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not BY_THREAD


def test_operators_give_the_same_results_under_the_mode() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(24.0).reshape(4, 6)
        tensor = scattered(whole, mesh, [Shard(0)])
        with CommDebugMode() as comm:
            view = tensor.view(2, 12)
            view.add_(1)
            row = tensor[1:3] * torch.full((6,), 2.0)
            row[0] = 5
            mean = row.softmax(-1).mean()
        plain = whole + 1
        expected = plain[1:3] * 2
        expected[0] = 5
        torch.testing.assert_close(tensor.full_tensor(), plain)
        torch.testing.assert_close(row.full_tensor(), expected)
        torch.testing.assert_close(mean.full_tensor(), expected.softmax(-1).mean())
        assert isinstance(mean, DTensor)
        assert "aten._softmax.default" in comm.generate_comm_debug_tracing_table(1)

    run_on_mesh((2,), body)


def test_counts_are_of_what_was_asked_for() -> None:
    """Whatever the backend takes for it: torch's operators find theirs."""
    ops = torch.ops.c10d_functional

    def body(mesh: DeviceMesh) -> None:
        rows = scattered(torch.arange(24.0).view(8, 3), mesh, [Shard(0)])
        terms = DTensor.from_local(torch.ones(8, 3), mesh, [Partial()])
        for made, placements, op in (
            (rows, [Replicate()], ops.all_gather_into_tensor),
            (rows, [Shard(1)], ops.all_to_all_single),
            (terms, [Replicate()], ops.all_reduce),
            (terms, [Shard(0)], ops.reduce_scatter_tensor),
        ):
            for wait in (False, True):
                with CommDebugMode() as comm:
                    made.redistribute(placements=placements, async_op=wait).to_local()
                assert comm.get_comm_counts() == {op: 1}, op
                assert comm.get_comm_counts()[op] == comm.get_total_counts() == 1
                assert comm.get_comm_counts() != {op: 2}
                assert not comm.get_comm_counts() != {op: 1}  # noqa: SIM202  asked by unittest
        for placements, kind in (([Shard(0)], "scatter"), ([Replicate()], "broadcast")):
            with CommDebugMode() as comm:
                distribute_tensor(torch.ones(8), mesh, placements)
            assert comm.get_comm_counts() == {kind: 1}
            assert comm.get_comm_counts()["agreement"] == 1, "on the arguments"
        with CommDebugMode() as comm:
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        assert (comm.get_total_counts(), comm.get_comm_counts()["agreement"]) == (0, 1)
        assert [seen.collective.kind for seen in comm.get_collectives()] == ["all_gather"]
        with CommDebugMode() as comm:  # not-a-number of a maximum is looked for by a second one
            DTensor.from_local(torch.ones(300_000), mesh, [Partial("max")]).full_tensor()
        assert comm.get_comm_counts() == {"all_reduce": 1}
        assert len(comm.get_collectives()) > 1
        with CommDebugMode() as comm:
            cast(DTensor, terms.sum()).full_tensor()
        assert comm.get_comm_counts() == {"all_reduce": 1}

    run_on_mesh((2,), body)
