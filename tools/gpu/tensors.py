"""What only a GPU decides about DTensors: devices, collectives, streams, numbers, graphs, speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, rand, random, strict, zeros
from dtckpt.dtensor.comm.collectives import Peers, all_gather, broadcast
from dtckpt.dtensor.comm.message_parts import ViewPart
from dtckpt.dtensor.comm.packing import Messages
from dtckpt.dtensor.comm.reductions import all_reduce, start_reduce_scatter
from dtckpt.dtensor.comm.streams import Origin
from dtckpt.dtensor.mesh.modes import active_mesh, is_strict
from dtckpt.errors import UnsupportedOp

from .setting import Finding, Setting, bits


def _mesh(setting: Setting) -> DeviceMesh:
    return DeviceMesh(setting.device.type, [dist.get_rank()])


def check_device(setting: Setting) -> Finding:
    """A mesh has this rank's device, whichever thread asks, and brings tensors to it."""
    mesh, problems = _mesh(setting), list[str]()
    seen = [mesh.device]

    def elsewhere() -> None:
        seen.append(DeviceMesh(mesh.device_type, mesh.layout_mesh, rank=dist.get_rank()).device)
        seen.append(zeros(3, device_mesh=mesh).to_local().device)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    seen.append(DTensor.from_local(torch.ones(3), mesh, [Replicate()]).to_local().device)
    if seen != [setting.device] * 4:
        problems.append(f"expected {setting.device} four times, got {seen}")
    return Finding(name="the device of a mesh, in every thread", problems=tuple(problems))


def _exchanged(x: Tensor, peers: Peers) -> Tensor:
    made = torch.empty_like(x)
    messages = Messages([[ViewPart(x)]], [[ViewPart(made)]], peers, x.device)
    messages.start(x.nbytes, peers.transport.costs)()
    return made


def check_collectives(setting: Setting) -> Finding:
    """Every collective of the library over the group of one rank, bit for bit."""
    peers = Peers(dist.group.WORLD, (0,))
    problems: list[str] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = torch.arange(1, 31, device=setting.device).view(5, 6).to(dtype)
        ways: dict[str, Callable[[], Tensor]] = {
            "all_gather": lambda x=x: all_gather(x, [(5, 6)], peers)[0],
            "all_to_all": lambda x=x: _exchanged(x, peers),
            "broadcast": lambda x=x: broadcast(x, 0, peers),
        }
        if dtype not in (torch.bool, torch.complex64):
            ways["all_reduce"] = lambda x=x: all_reduce(x, "sum", peers)
            ways["reduce_scatter"] = lambda x=x: start_reduce_scatter([x], "sum", peers)()
        for name, way in ways.items():
            if bits(way()) != bits(x):
                problems.append(f"{name} of {dtype}")
    return Finding(
        name=f"collectives over {dist.get_backend()}, a group of one", problems=tuple(problems)
    )


def check_streams(setting: Setting) -> Finding:
    """What is begun on one stream and used on another is whole."""
    problems: list[str] = []
    if setting.device.type != "cuda":
        return Finding(name="streams", notes=("this device has none",))
    for number in range(setting.rounds):
        begun, used = torch.cuda.Stream(setting.device), torch.cuda.Stream(setting.device)
        with torch.cuda.stream(begun):
            x = torch.full((1 << 24,), float(number + 1), device=setting.device)
            origin = Origin(setting.device)
        held = [x]
        del x
        with torch.cuda.stream(used):
            made = origin.finish(lambda held=held: held.pop() * 2)
            total = made.sum()
            del made  # its memory may now be written by the first stream, if it may at all
        with torch.cuda.stream(begun):
            torch.full((1 << 24,), -1.0, device=setting.device)
        setting.wait()
        if float(total) != (number + 1) * 2.0 * (1 << 24):
            problems.append(f"round {number}: the sum is {float(total)}")
    return Finding(
        name="results on another stream than they were begun on", problems=tuple(problems)
    )


_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda x: x.uniform_(-1, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.1),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "random_": lambda x: x.random_(0, 100),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 9.5)),
    "dropout": lambda x: torch.dropout(torch.ones_like(x), 0.4, True),
}


def check_random(setting: Setting) -> Finding:
    """Random numbers are those of the CPU, to the last bit."""
    problems: list[str] = []
    here, host = _mesh(setting), DeviceMesh("cpu", [dist.get_rank()], rank=dist.get_rank())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (7, 1024, 70_001):
            for name, draw in _DRAWS.items():
                drawn: list[bytes] = []
                for mesh in (here, host):
                    random.manual_seed(11, mesh)
                    empty = torch.zeros(size, dtype=dtype)
                    made: Any = draw(DTensor.from_local(empty, mesh, [Shard(0)]))
                    drawn.append(bits(made.to_local()))
                if drawn[0] != drawn[1]:
                    problems.append(f"{name} of {size} in {dtype}")
    return Finding(name="random numbers equal those of the CPU", problems=tuple(problems))


def check_backward(setting: Setting) -> Finding:
    """Settings of with blocks hold in the backward pass, and where it runs a forward pass again."""
    mesh, problems = _mesh(setting), list[str]()
    x = DTensor.from_local(torch.ones(4), mesh, [Replicate()]).detach().requires_grad_()
    seen: list[object] = []
    y = (x * 2).sum()

    def look(_: Tensor) -> None:
        seen.extend((is_strict(), active_mesh() is mesh))

    y.register_hook(look)
    with strict(), mesh:
        y.backward()
    if seen != [True, True]:
        problems.append(f"strict and the active mesh in a backward pass: {seen}")

    def again(t: Tensor) -> Tensor:
        return (t + zeros(4)).sin().sum()

    with mesh:
        made: Any = checkpoint(again, x, use_reentrant=False)
        made.backward()
    return Finding(name="settings in backward passes", problems=tuple(problems))


def check_capture(setting: Setting) -> Finding:
    """A graph that would repeat random numbers is refused."""
    if setting.device.type != "cuda":
        return Finding(name="graphs", notes=("this device captures none",))
    mesh = _mesh(setting)
    x = DTensor.from_local(torch.ones(4096), mesh, [Replicate()])
    torch.dropout(x, 0.5, True)
    setting.wait()
    problems = ["a capture of dropout was not refused"]
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                torch.dropout(x, 0.5, True)
            except UnsupportedOp:
                problems = []
            _ = x.to_local() + 1  # a graph of nothing is warned about
    except RuntimeError as error:
        problems.append(f"the capture broke: {error}")
    return Finding(name="random numbers in a captured graph", problems=tuple(problems))


def check_tensor_speed(setting: Setting) -> Finding:
    """How long operators, random numbers and redistributing take beside torch's own."""
    mesh = _mesh(setting)
    plain = torch.ones(64, 64, device=setting.device)
    wrapped = DTensor.from_local(plain, mesh, [Shard(0)])
    large = torch.empty(setting.mib << 17, device=setting.device)  # an eighth of the state
    ours = DTensor.from_local(large, mesh, [Shard(0)])
    with torch.no_grad():
        numbers = {
            "add of a plain tensor, us": _microseconds(setting, lambda: plain + plain, 200),
            "add of a DTensor, us": _microseconds(setting, lambda: wrapped + wrapped, 200),
            "redistribute to Replicate, us": _microseconds(
                setting, lambda: wrapped.redistribute(placements=[Replicate()]), 200
            ),
            "rand of 64 numbers, us": _microseconds(
                setting, lambda: rand(64, device_mesh=mesh), 50
            ),
        }
        for name, tensor in (("torch", large), ("a DTensor", ours)):
            taken = _microseconds(setting, tensor.normal_, 3) * 1e3
            numbers[f"normal_ of {name}, ns a number"] = taken / large.numel()
    return Finding(name="speed of operators and random numbers", numbers=numbers)


def _microseconds(setting: Setting, run: Callable[[], object], count: int) -> float:
    """Return what one call takes, the middle one of some rounds."""
    found: list[float] = []
    for _ in range(setting.rounds + 1):
        setting.wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        setting.wait()
        found.append((time.perf_counter() - start) / count * 1e6)
    return median(found[1:])
