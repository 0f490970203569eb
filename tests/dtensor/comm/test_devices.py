"""Which device a rank takes and on which stream work ends, with accelerators that are pretended."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, rand
from dtckpt.dtensor import torch_private as private
from dtckpt.dtensor.comm import devices
from dtckpt.dtensor.comm.devices import device_of_rank
from dtckpt.dtensor.comm.streams import Origin, SideStream
from dtckpt.dtensor.mesh.spec import spec_of
from dtckpt.dtensor.tensor.awaited import awaited
from dtckpt.errors import PlacementError, UnsupportedOp

from ..mesh.test_device_mesh import run_script
from ..rank_meshes import run_on_mesh


class Accelerator:
    """Stands for a module such as ``torch.cuda``: devices, streams, and what was asked of it."""

    def __init__(self, count: int, *, current: int | None = None) -> None:
        self.count = count
        self.calls: list[Any] = []
        self.capturing = False
        self._current = threading.local()
        self._is_initialized = current is not None
        self._current.index = current or 0
        self.streams = threading.local()

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self._is_initialized

    def current_device(self) -> int:
        return getattr(self._current, "index", 0)

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))
        self._is_initialized, self._current.index = True, index

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Stream(self, _: torch.device) -> Any:
        return Stream("side", self.calls)

    def current_stream(self, _: torch.device) -> Any:
        if not hasattr(self.streams, "current"):
            self.streams.current = Stream("default", self.calls)
        return self.streams.current

    @contextmanager
    def stream(self, stream: Any) -> Generator[None]:
        before = self.streams.current
        self.streams.current = stream
        try:
            yield
        finally:
            self.streams.current = before


class Stream:
    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: Stream) -> None:
        self.calls.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self.calls.append((self.name, "waits for", event))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes torch have some devices of type cuda."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def pretend(count: int, *, current: int | None = None, local_rank: str | None = None) -> Any:
        module = Accelerator(count, current=current)
        real = torch.get_device_module

        def module_of(device: object = None) -> Any:
            return module if str(device).startswith("cuda") else real(cast(Any, device))

        monkeypatch.setattr(torch, "get_device_module", module_of)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        return module

    return pretend


CHOICES: list[tuple[dict[str, Any], int, list[int]]] = [
    ({"count": 4, "local_rank": "2"}, 2, [2]),
    ({"count": 4, "local_rank": "2", "current": 3}, 3, []),
    ({"count": 4, "local_rank": "2", "current": 0}, 0, []),
    ({"count": 1, "local_rank": "2"}, 0, [0]),
    ({"count": 4}, 0, [0]),
]


@pytest.mark.parametrize(("machine", "index", "selected"), CHOICES)
def test_the_device_of_a_rank(
    pretended: Any, machine: dict[str, Any], index: int, selected: list[int]
) -> None:
    module = pretended(**machine)
    assert device_of_rank("cuda") == torch.device("cuda", index)
    assert [call[1] for call in module.calls] == selected, "what a program has selected stays"
    assert device_of_rank("cuda") == torch.device("cuda", index)


def test_a_local_rank_without_a_device_is_refused(pretended: Any) -> None:
    pretended(2, local_rank="5")
    with pytest.raises(PlacementError, match="LOCAL_RANK is 5, but this process sees 2 devices"):
        device_of_rank("cuda")


def test_without_a_launcher_the_rank_decides_with_a_warning(
    pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SimpleNamespace(bound_device_id=None)
    job = SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: 5,
        get_world_size=lambda: 8,
        group=SimpleNamespace(WORLD=world),
    )
    monkeypatch.setattr(devices, "dist", job)
    module = pretended(4)
    with pytest.warns(UserWarning, match="device 1 of type 'cuda' is taken for rank 5"):
        assert device_of_rank("cuda") == torch.device("cuda", 1)
    assert module.calls == [("set_device", 1)]
    pretended(3)
    with pytest.raises(PlacementError, match="8 ranks do not share 3 devices"):
        device_of_rank("cuda")
    world.bound_device_id = torch.device("cuda", 2)
    assert device_of_rank("cuda") == torch.device("cuda", 2), "what the group is bound to"


def test_types_without_an_index() -> None:
    assert device_of_rank("cpu") == torch.device("cpu")
    assert device_of_rank("meta") == torch.device("meta")
    if not torch.cuda.is_available():
        assert device_of_rank("cuda") == torch.device("cuda")


def test_the_device_of_a_mesh_is_the_same_in_every_thread(pretended: Any) -> None:
    pretended(4, local_rank="3")
    mesh = DeviceMesh("cuda", [[0]], mesh_dim_names=("a", "b"), rank=0)
    seen = [mesh.device, mesh["a"].device]
    fresh = DeviceMesh("cuda", [0], rank=0)
    assert fresh.device.index == 3
    thread = threading.Thread(
        target=lambda: seen.extend([mesh.device, mesh.flatten().device, fresh.device])
    )
    thread.start()
    thread.join()
    assert seen == [torch.device("cuda", 3)] * 5


def test_nothing_else_makes_a_device_of_a_type_alone() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", r"torch\.device\([a-z_.]*device_type\)", "--", "dtensor"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert {line.split(":")[0] for line in found.splitlines()} <= {
        "dtensor/comm/devices.py",
        "dtensor/comm/streams.py",
    }, found


def test_from_local_brings_a_tensor_to_the_device_of_the_mesh() -> None:
    mesh = DeviceMesh("meta", [0], rank=0)
    local = torch.ones(4, requires_grad=True)
    made = DTensor.from_local(local, mesh, [Shard(0)])
    assert made.to_local().device == mesh.device == torch.device("meta")
    assert made.requires_grad
    on_cpu = DeviceMesh("cpu", [0], rank=0)
    stays = DTensor.from_local(torch.ones(4, device="meta"), on_cpu, [Shard(0)])
    assert stays.to_local().is_meta
    assert DTensor.from_local(local.detach(), on_cpu).to_local().data_ptr() == local.data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_from_local_says_where_a_tensor_cannot_go() -> None:
    mesh = DeviceMesh("cuda", [0], rank=0)
    with pytest.raises(PlacementError, match="a tensor on cpu cannot be brought to cuda"):
        DTensor.from_local(torch.ones(4), mesh, [Replicate()])


class OnDevice:
    """A result on a device of the pretended accelerator."""

    def __init__(self, calls: list[Any]) -> None:
        self.device = torch.device("cuda", 0)
        self.calls = calls

    def record_stream(self, stream: Stream) -> None:
        self.calls.append(("result stays for", stream.name))


def test_what_is_awaited_on_another_stream_ends_where_it_began(pretended: Any) -> None:
    module = pretended(1, current=0)
    module.streams.current = first = Stream("first", module.calls)
    origin = Origin(torch.device("cuda", 0))
    result: Any = OnDevice(module.calls)

    def finish() -> Tensor:
        module.calls.append(("ends on", module.current_stream(None).name))
        return result

    assert origin.finish(finish) is result
    assert module.calls == [("ends on", "first")], "nothing to do on the same stream"
    module.calls.clear()
    module.streams.current = Stream("second", module.calls)
    assert origin.finish(finish) is result
    assert module.calls == [
        ("ends on", "first"),
        ("second", "waits for", "first"),
        ("result stays for", "second"),
    ]
    assert module.streams.current.name == "second" != first.name


def test_an_awaited_tensor_remembers_its_stream(pretended: Any) -> None:
    module = pretended(1, current=0)
    module.streams.current = Stream("first", module.calls)
    mesh = DeviceMesh("cpu", [0], rank=0)
    spec = spec_of(mesh, (Replicate(),), (2,), None, torch.float32)
    ended: list[str] = []

    def finish() -> Tensor:
        ended.append(module.current_stream(None).name)
        return torch.ones(2)

    tensor = awaited(DTensor, finish, spec, torch.device("cuda", 0))
    module.streams.current = Stream("second", module.calls)
    assert (tensor + 1).to_local().tolist() == [2, 2]  # pyright: ignore[reportAttributeAccessIssue]
    assert ended == ["first"]


def test_random_numbers_are_not_captured(pretended: Any) -> None:
    module = pretended(1, current=0)
    mesh = DeviceMesh("cpu", [0], rank=0)
    assert mesh.device.type == "cpu"  # where the memory is
    mesh._device_type = "cuda"  # pyright: ignore[reportPrivateUsage]
    module.capturing = True
    with pytest.raises(UnsupportedOp, match=r"within a graph capture.*repeat the numbers"):
        rand(4, device_mesh=mesh)
    module.capturing = False
    rand(4, device_mesh=mesh)


def test_async_op_needs_no_streams_on_the_cpu() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
        moved = tensor.redistribute(placements=[Replicate()], async_op=True)
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(moved.to_local()))
        thread.start()
        thread.join()
        assert found[0].tolist() == [1] * 6

    run_on_mesh((2,), body)


AUTOGRAD_THREADS = """
import os, threading, torch
from torch.utils import backend_registration
from dtckpt.dtensor import DeviceMesh, implicit_replication, strict
from dtckpt.dtensor.tensor.local_parts import brought
from dtckpt.dtensor.mesh.modes import active_mesh, is_strict, replicates_plain_tensors

class Module(backend_registration._DummyBackendModule):
    def current_device(self):
        return 0

    def set_device(self, index):
        assert index == 0

backend_registration._setup_privateuseone_for_python_backend("made_up", Module())
empty = torch._C._acc.create_empty_tensor
mesh, other = DeviceMesh("cpu", [0], rank=0), DeviceMesh("cpu", [0], rank=0)
seen = []

def now():
    return is_strict(), replicates_plain_tensors(), active_mesh()

class Through(torch.autograd.Function):  # its backward runs in a thread of the device
    @staticmethod
    def forward(ctx, x):
        return empty((3,), torch.float32)

    @staticmethod
    def backward(ctx, grad):
        assert threading.current_thread() is not threading.main_thread()
        seen.append(now())
        with strict(False), other:
            seen.append(now())
        seen.append(now())
        return torch.ones(3)

def run():
    x = torch.ones(3, requires_grad=True)
    seen.clear()
    torch.autograd.backward(Through.apply(x), empty((3,), torch.float32))
    return list(seen)

default, inner = (False, False, None), (False, False, other)
for _ in range(2):
    assert run() == [default, inner, default], seen
    with strict(), mesh:
        assert run() == [(True, False, mesh), inner, (True, False, mesh)], seen
        with implicit_replication(), strict(False):
            assert run() == [(False, True, mesh), (False, True, other), (False, True, mesh)], seen
        assert run()[0] == (True, False, mesh)
    assert now() == default

far = DeviceMesh("made_up", [0], rank=0)
assert far.device == torch.device("made_up", 0), far.device
local = empty((3,), torch.float32)
assert brought(local, far) is local
os._exit(0)  # a thread of autograd that lets go of Python objects while these end aborts
"""


@pytest.mark.skipif(
    private.found("_C._acc.create_empty_tensor") is None or torch.__version__.startswith("2.11."),
    reason="torch has no such backends, or crashes with them",
)
def test_settings_reach_the_threads_of_autograd() -> None:
    run_script(AUTOGRAD_THREADS)


def test_work_on_a_stream_beside_the_current_one(pretended: Any) -> None:
    module = pretended(1, current=0)
    device = torch.device("cuda:0")
    side = SideStream(device)
    seen: list[str] = []

    class Made:
        device = torch.device("cuda:0")

        def record_stream(self, stream: Stream) -> None:
            module.calls.append(("kept for", stream.name))

    made: list[Any] = []
    with side.resumed(lambda: made):  # nothing was queued there yet
        seen.append(module.current_stream(device).name)
    for event in (None, "event"):
        with side.queued(event):
            seen.append(module.current_stream(device).name)
    with side.resumed(lambda: made):
        made += [Made(), torch.ones(1)]
    assert seen == ["default", "side", "side"]
    assert module.calls == [
        ("side", "waits for", "default"),
        ("side", "waits for", "event"),
        ("default", "waits for", "side"),
        ("kept for", "default"),
    ]
