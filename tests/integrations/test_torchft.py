"""torchft's transport by dtckpt: its own recovery scenario, a Manager's calls, damage, silence."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import as_completed
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dtckpt.checkpoint as ckpt

from ..processes import run_processes
from . import needs, run_page

pytestmark = [
    needs("torchft"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SHORT = timedelta(seconds=60)


def transport(**told: Any) -> Any:
    from dtckpt.integrations.torchft import DtckptTransport

    return DtckptTransport(**told)


def test_the_scenario_of_torchft_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: Any = importlib.import_module("torchft.checkpointing.transport_test")
    # Its mesh is that of rank 1, which is not there: on such a mesh rank 0 holds nothing.
    meshes: Any = importlib.import_module("torch.distributed.device_mesh")

    def mesh_of_rank_0(device: str, _: int) -> Any:
        return meshes.DeviceMesh(device, 0)

    def barrier(size: int, timeout: float) -> threading.Barrier:
        return threading.Barrier(size, timeout=12 * timeout)

    def ended(futures: Any, timeout: float) -> Any:
        return as_completed(futures, timeout=12 * timeout)

    monkeypatch.setattr(theirs, "DeviceMesh", mesh_of_rank_0)
    # Its limits are seconds, which a machine that does other things beside needs for importing.
    monkeypatch.setattr(theirs, "threading", SimpleNamespace(Barrier=barrier))
    monkeypatch.setattr(theirs, "as_completed", ended)
    test_a_step_is_waited_for_and_not_for_ever()

    def made(_: int, __: int) -> Any:
        return transport(state_dict=lambda: theirs.make_state_dict(torch.device("cpu")))

    try:
        theirs.run_multi_recovery_test(TestCase(), made, torch.device("cpu"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_state_of_a_manager_arrives_as_it_was() -> None:
    model = torch.nn.Linear(300, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    user = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state = {"user": {"default": user}, "torchft": {"step": 3, "batches_committed": 6}}
    sender, receiver = transport(), transport()
    sender.send_checkpoint([1], 3, state, SHORT)
    with torch.no_grad():
        model.weight.zero_()  # the training goes on
    found = receiver.recv_checkpoint(0, sender.metadata(), 3, SHORT)
    assert found["torchft"] == state["torchft"]
    got = found["user"]["default"]
    assert got["model"]["weight"].abs().sum() > 0, "as it was when it was sent"
    fresh = torch.optim.AdamW(torch.nn.Linear(300, 500).parameters())
    fresh.load_state_dict(got["optimizer"])
    for number, entry in optimizer.state_dict()["state"].items():
        assert fresh.state_dict()["state"][number]["exp_avg"].equal(entry["exp_avg"])
    for each in (sender, receiver):
        each.shutdown()


def test_a_step_is_waited_for_and_not_for_ever() -> None:
    sender, receiver = transport(), transport()
    told = sender.metadata()
    with pytest.raises(ckpt.StorageError, match=r"timed out.*no step is"):
        receiver.recv_checkpoint(0, told, 1, timedelta(milliseconds=100))
    sender.send_checkpoint([1], 1, {"a": 1}, SHORT)
    with pytest.raises(ckpt.StorageError, match="step 1 is served"):
        receiver.recv_checkpoint(0, told, 2, timedelta(milliseconds=100))
    later = threading.Timer(0.2, sender.send_checkpoint, ([1], 2, {"a": 2}, SHORT))
    later.start()
    assert receiver.recv_checkpoint(0, told, 2, SHORT) == {"a": 2}
    later.join()
    sender.disallow_checkpoint()
    with pytest.raises(ckpt.StorageError, match="no step is"):
        receiver.recv_checkpoint(0, told, 2, timedelta(milliseconds=100))
    sender.shutdown()
    with pytest.raises(ckpt.StorageError):
        receiver.recv_checkpoint(0, told, 2, timedelta(milliseconds=500))
    receiver.shutdown()


def test_damage_on_the_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = transport(), transport()
    sender.send_checkpoint([1], 1, {"w": torch.ones(100_000)}, SHORT)
    store: Any = importlib.import_module("dtckpt.integrations.torchft.remote_store")
    fill = store.RemoteStore._fill

    def damaged(self: Any, name: str, start: int, view: memoryview) -> None:
        fill(self, name, start, view)
        if len(view) > 100_000:
            view[50_000] ^= 1

    monkeypatch.setattr(store.RemoteStore, "_fill", damaged)
    with pytest.raises(ckpt.Corrupt, match="state/w"):
        receiver.recv_checkpoint(0, sender.metadata(), 1, SHORT)
    for each in (sender, receiver):
        each.shutdown()


def test_dtensors_have_the_meshes_of_who_receives_them() -> None:
    c10d: Any = dist
    c10d.init_process_group("gloo", rank=0, world_size=1, store=c10d.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        sent = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        own = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
        sender, receiver = transport(), transport(state_dict=lambda: {"w": own})
        sender.send_checkpoint([1], 1, {"w": sent}, SHORT)
        found = receiver.recv_checkpoint(0, sender.metadata(), 1, SHORT)["w"]
        assert isinstance(found, DTensor)
        assert found.placements == (Shard(0),)
        assert found.to_local().tolist() == list(range(6))
        assert not own.to_local().any(), "what is there stays until the Manager loads it"
        with pytest.raises(ckpt.LayoutMismatch, match="state_dict="):
            sender.recv_checkpoint(0, sender.metadata(), 1, SHORT)
        for each in (sender, receiver):
            each.shutdown()
    finally:
        dist.destroy_process_group()


def test_a_replica_that_died_heals_from_one_that_lives() -> None:
    run_processes("tests.integrations.torchft_ranks", 1)


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("torchft", tmp_path)
