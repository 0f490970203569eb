"""Saves and loads of tensors on a GPU: every bit, and how fast."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import dtckpt.checkpoint as ck
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.staging.area import StagingPool

from .setting import MIB, Finding, Setting, State, differing, emptied

TIMEOUT = timedelta(seconds=120)
"""After which a rank that is silent is given up."""


def check_group(setting: Setting) -> Finding:
    """The group works, and saves and loads over it find their way."""
    ones = torch.ones(1000, device=setting.device)
    dist.all_reduce(ones)
    problems = [] if float(ones.sum()) == 1000 * dist.get_world_size() else ["all_reduce is wrong"]
    state = setting.odd_state()
    problems += differing(state, _saved_and_loaded(setting, state, "group", setting.device))
    newest = ck.latest(setting.folder)
    if newest is not None:
        problems.append(f"latest() took {newest.url} for a step")
    return Finding(
        name=f"{dist.get_backend()}: all_reduce, save, load and latest over the group",
        problems=tuple(problems),
    )


def _saved_and_loaded(
    setting: Setting, state: State, name: str, device: torch.device | str
) -> State:
    with setting.place(name) as path:
        ck.save(state, path, timeout=TIMEOUT)
        into = emptied(state, device)
        ck.load(into, path, timeout=TIMEOUT)
    return into


def check_other_device(setting: Setting) -> Finding:
    """What one device saved another one loads."""
    state = setting.odd_state()
    problems = differing(state, _saved_and_loaded(setting, state, "to-cpu", "cpu"))
    host = {name: tensor.cpu() for name, tensor in state.items()}
    problems += differing(host, _saved_and_loaded(setting, host, "from-cpu", setting.device))
    with torch.device("meta"):
        module = torch.nn.Linear(300, 200)
    source = torch.nn.Linear(300, 200, device=setting.device)
    with setting.place("module") as path:
        ck.save({"model": source}, path, timeout=TIMEOUT)
        ck.load({"model": module}, path, device=setting.device, timeout=TIMEOUT)
    problems += differing(dict(source.state_dict()), dict(module.state_dict()))
    if module.weight.device.type != setting.device.type:
        problems += (f"the weight of a module of no device is on {module.weight.device}",)
    return Finding(name="between device and CPU, and onto a module of no device", problems=problems)


def check_async_content(setting: Setting) -> Finding:
    """The state at the call is saved, whatever the device does next, on whichever stream."""
    problems: list[str] = []
    for number in range(setting.rounds):
        on_cuda = setting.device.type == "cuda"
        stream = torch.cuda.Stream(setting.device) if on_cuda and number % 2 else None
        setting.wait()
        on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
        with on_stream, setting.place("async") as path:
            state = setting.timed_state()
            for tensor in state.values():  # still under way when the save begins
                tensor.mul_(2).add_(number)
            handle = ck.async_save(state, path, timeout=TIMEOUT)
            expected = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in state.values():
                tensor.fill_(-1)
            handle.result()
            into = emptied(state, setting.device)
            ck.load(into, path, timeout=TIMEOUT)
        setting.wait()
        problems += differing(expected, into)
    return Finding(
        name="async_save holds the state at the call, on the current stream",
        problems=tuple(problems),
    )


def check_spread(setting: Setting) -> Finding:
    """What is copied beside the training is the state of the call, or the save fails."""
    problems: list[str] = []
    side = int((setting.mib * MIB / 16) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(2)))
    model.to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.ones(4, side, device=setting.device)
    stalls: list[float] = []
    for number in range(setting.rounds + 1):
        model(batch).square().mean().backward()
        optimizer.step()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with setting.place("spread") as path:
            with setting.timed(stalls):
                state = {"model": model, "optimizer": optimizer}
                handle = ck.async_save(state, path, spread=True, timeout=TIMEOUT)
            if number % 2:
                model(batch).square().mean().backward()
            optimizer.step()
            handle.result()
            into = emptied(expected, setting.device)
            ck.load({"model": into}, path, strict=False, timeout=TIMEOUT)
        problems += differing(expected, into)
    with setting.place("written") as path:
        handle = ck.async_save(
            {"model": model, "optimizer": optimizer}, path, spread=True, timeout=TIMEOUT
        )
        with torch.no_grad():
            next(model.parameters()).add_(1)
        if not isinstance(handle.exception(), ck.StateChanged):
            problems.append("a write before the next step was not found")
    return Finding(
        name="async_save(spread=True): the state of the call, copied beside the training",
        problems=tuple(problems),
        numbers={"stall and copies, ms": median(stalls[1:]) * 1e3},
    )


def check_staging(setting: Setting) -> Finding:
    """How long the training waits for a save in the background, beside a copy to pinned memory."""
    state, total = setting.timed_state(), setting.mib * MIB
    stalls: list[float] = []
    saves: list[float] = []
    for _ in range(setting.rounds + 1):
        with setting.place("stall") as path, setting.timed(saves):
            with setting.timed(stalls):
                handle = ck.async_save(state, path, timeout=TIMEOUT)
            handle.result()
    on_cuda = setting.device.type == "cuda"
    host = [torch.empty_like(t, device="cpu", pin_memory=on_cuda) for t in state.values()]
    copies: list[float] = []
    for _ in range(setting.rounds + 1):
        with setting.timed(copies):
            for target, source in zip(host, state.values(), strict=True):
                target.copy_(source, non_blocking=True)
    pinned = staging_is_pinned()
    problems = ("staging memory could not be pinned: copies are slower",)
    rest = stalls[1:]
    return Finding(
        name="async_save: the stall of the caller",
        problems=problems if on_cuda and not pinned else (),
        notes=(f"staging memory is {'pinned' if pinned else 'not pinned'}",),
        numbers={
            "first stall, GB/s": total / stalls[0] / 1e9,
            "stall, GB/s": total / median(rest) / 1e9,
            "copy to pinned memory, GB/s": total / median(copies[1:]) / 1e9,
            "stall over copy, times": median(rest) / median(copies[1:]),
            "whole save, GB/s": total / median(saves[1:]) / 1e9,
        },
    )


def staging_is_pinned() -> bool:
    """Whether the memory into which the last save over the default group was staged is pinned."""
    pool: StagingPool = members_of(dist.group.WORLD).memory["staging"]
    area: Any = pool.take()
    is_pinned = area._unpin is not None
    pool.give_back(area)
    return is_pinned


def check_speed(setting: Setting) -> Finding:
    """Save and load of a large state: how fast, and right to the last bit."""
    state, total = setting.timed_state(), setting.mib * MIB
    saves: list[float] = []
    loads: list[float] = []
    problems: tuple[str, ...] = ()
    for _ in range(setting.rounds + 1):
        with setting.place("speed") as path:
            with setting.timed(saves):
                ck.save(state, path, timeout=TIMEOUT)
            into = emptied(state, setting.device)
            with setting.timed(loads):
                ck.load(into, path, timeout=TIMEOUT)
        problems += differing(state, into)
    return Finding(
        name="save and load",
        problems=problems,
        numbers={
            "save, GB/s": total / median(saves[1:]) / 1e9,
            "load, GB/s": total / median(loads[1:]) / 1e9,
        },
    )
