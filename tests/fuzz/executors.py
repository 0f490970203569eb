"""Runs of a program: on one device, and on the ranks of a team."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate
from dtckpt.dtensor.debug import clear_caches
from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.dtensor.geometry.placement import parse_placements
from dtckpt.dtensor.tensor.views.copied_view import CopiedView
from dtckpt.errors import UnsupportedOp

from .compiling import compiled_lines
from .program import Program, changed_in, code_of
from .ranks import Team
from .values import distributed_input, indices_of, plain_input

Compiled = tuple[Callable[..., dict[str, Any]], int]
"""A compiled function of the first lines of a program, and how many those are."""


@dataclass(slots=True)
class Shown:
    """What is seen of one value on one rank after a run."""

    kind: str
    """``distributed``, ``plain``, ``other`` or ``unreadable``."""
    value: Any = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: Layout | None = None
    spec_dtype: torch.dtype | None = None
    requires_grad: bool = False


@dataclass(slots=True)
class Trace:
    """What came of one run on one device or one rank."""

    env: dict[str, Any] = field(default_factory=dict[str, Any])
    """Names and values (one device), or ``Shown`` of them (a rank)."""
    failed_line: int | None = None
    error: Exception | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class Helpers:
    """Functions that lines call beside torch's; those of one device."""

    def namespace(self) -> dict[str, Any]:
        """Return the names that lines may use."""
        own = {name: getattr(self, name) for name in _HELPERS}
        return {"torch": torch, "F": F, "nn": nn, "inf": math.inf, "nan": math.nan, **own}

    def redistribute(self, x: Tensor, placements: str) -> Any:
        """Move a tensor to other placements; the result may share memory with it."""
        del placements
        return x.view_as(x) if x.requires_grad else x.clone()

    def whole(self, x: Tensor) -> Any:
        """Return all of a tensor as a plain one."""
        return x.clone()

    def rewrap(self, x: Tensor) -> Any:
        """Take the local part of a tensor, and make one of it again.

        They share memory. Autograd knows of that only where it follows the first one.
        """
        return x.view_as(x) if x.requires_grad else x.detach()

    def gradients(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Any]:
        """Return gradients of leaves, for cotangents that depend on the shapes alone."""
        wanted = [o for o in outputs if o.requires_grad]
        given = [self.like(o, cotangent(tuple(o.shape), o.dtype)) for o in wanted]
        return list(torch.autograd.grad(wanted, leaves, given, allow_unused=True))

    def accumulated(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Any]:
        """Return what two backward passes leave in the ``.grad`` of leaves."""
        wanted = [o for o in outputs if o.requires_grad]
        for _ in range(2):
            given = [self.like(o, cotangent(tuple(o.shape), o.dtype)) for o in wanted]
            torch.autograd.backward(wanted, given, retain_graph=True, inputs=list(leaves))
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    def like(self, x: Tensor, values: Tensor) -> Any:
        """Return values that all ranks have, laid out as ``x``."""
        del x
        return values

    def placed(self, values: Tensor, placements: str) -> Any:
        """Return values that all ranks have in some placements."""
        del placements
        return values

    def module(
        self, made: nn.Module, placements: str = "", dtype: torch.dtype | None = None
    ) -> Any:
        """Fill a module's parameters, and place those that have the dims that are told."""
        made = made.to(dtype) if dtype is not None else made
        for number, (name, parameter) in enumerate(list(made.named_parameters())):
            path, _, own = name.rpartition(".")
            shape = tuple(parameter.shape)
            values = (cotangent(shape, torch.float32) / 4 + number / 16).to(parameter.dtype)
            where = self.placed(values, placements) if placements else values
            setattr(made.get_submodule(path), own, nn.Parameter(where))
        return made

    def step(
        self, kind: Any, parameters: Sequence[Tensor], gradients: Sequence[Any], **options: Any
    ) -> None:
        """Let an optimizer take two steps."""
        optimizer = kind(list(parameters), **options)
        for _ in range(2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.detach().clone()
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None


_HELPERS = (
    "redistribute",
    "whole",
    "rewrap",
    "gradients",
    "accumulated",
    "module",
    "step",
    "placed",
)


class RankHelpers(Helpers):
    """Those of a rank of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def redistribute(self, x: Any, placements: str) -> Any:
        return x.redistribute(placements=parse_placements(placements))

    def whole(self, x: Any) -> Any:
        return x.full_tensor().clone()

    def rewrap(self, x: Any) -> Any:
        if isinstance(x, CopiedView):
            raise UnsupportedOp("a view in name only has no memory for others to share")
        return DTensor.from_local(x.to_local(), self.mesh, x.placements, shape=x.shape)

    def like(self, x: Any, values: Tensor) -> Any:
        if not isinstance(x, DTensor):
            return values
        placements = [Replicate() if p.is_partial() else p for p in x.placements]
        return self._laid_out(values, placements)

    def placed(self, values: Tensor, placements: str) -> Any:
        ndim = values.ndim
        wanted = [
            p if not p.is_shard() or cast(Any, p).dim < ndim else Replicate()
            for p in parse_placements(placements)
        ]
        return self._laid_out(values, wanted)

    def _laid_out(self, values: Tensor, placements: Sequence[Any]) -> Any:
        layout = Layout(self.mesh.layout_mesh, tuple(placements), tuple(values.shape))
        here = self.mesh.get_coordinate() or ()
        local = values.reshape(-1)[indices_of(layout, here)]
        return DTensor.from_local(local, self.mesh, placements, shape=values.shape)


def cotangent(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values that are neither equal nor large."""
    numel = torch.Size(shape).numel()
    steps = torch.from_numpy((np.arange(numel) * 7 % 11 - 4) / 4)
    return steps.to(dtype).reshape(shape)


def run_plain(program: Program, numbers: dict[str, Any], noise: Noise | None = None) -> Trace:
    """Run on one device; stops at the first line that raises."""
    trace = Trace()
    env = {**Helpers().namespace(), **numbers}
    hidden = set(env)
    for name, given in program.inputs.items():
        env[name], trace.buffers[name] = plain_input(given)
    if noise is not None:  # operators that are linear round the terms of a sum one by one
        inputs = program.inputs.items()
        noise.add([env[n] for n, given in inputs if re.search(r"P\((sum|avg)", given.placements)])
    for number, line in enumerate(program.lines):
        try:
            exec(code_of(line), env)
        except Exception as error:
            trace.failed_line, trace.error = number, error
            break
        if noise is not None:
            noise.add([env[name] for name in changed_in(line) if name in env])
    trace.env = {k: v for k, v in env.items() if k not in hidden and not k.startswith("__")}
    return trace


class Noise:
    """Changes floats by as much as rounding may; shows what a program makes of that."""

    def __init__(
        self,
        seed: int,
        *,
        of_zeros: bool = False,
        of_largest: bool = False,
        onto: Sequence[float] = (),
        sign: int = 1,
    ) -> None:
        """``onto`` are numbers that values become which are as close to them as rounding comes."""
        self._generator = torch.Generator().manual_seed(seed)
        self._onto = onto
        self._sign = sign
        self._of_zeros, self._of_largest = of_zeros, of_largest
        self._changes_all = seed % 2 == 0
        self._num_eps = 1 + seed // 2

    def add(self, values: list[Any]) -> None:
        """Change tensors in place."""
        for value in values:
            if isinstance(value, list | tuple):
                self.add(list(cast(Any, value)))
            if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
                continue
            size = self._num_eps * torch.finfo(value.dtype).eps
            # Half of them change all values, so that a number equal to another one is not.
            lowest = 0 if self._changes_all else -1
            signs = torch.randint(lowest, 2, value.shape, generator=self._generator)
            signs = (signs * 2 - 1 if self._changes_all else signs) * self._sign
            with suppress(RuntimeError):  # of values that share one element of memory
                # By way of data: autograd counts no write.
                if self._onto:
                    finite = value.data[value.data.isfinite()].abs()
                    reach = torch.finfo(value.dtype).eps * float(finite.max() if len(finite) else 0)
                    for number in self._onto:
                        value.data[(value.data - number).abs() <= reach] = number
                elif self._of_largest:  # terms of a small sum may be as large as any other one
                    largest = value.data[value.data.isfinite()].abs().max() if value.numel() else 0
                    if self._changes_all:
                        value.data.add_(size * largest * signs.to(value.dtype))
                    else:  # or cancel
                        value.data[value.data.abs() <= size * largest] = 0
                else:
                    value.data.mul_(1 + size * signs.to(value.dtype))
                if self._of_zeros:  # where terms cancel
                    zeros = value.data == 0
                    value.data[zeros] = size * signs[zeros].to(value.dtype)


class Executor:
    """Runs programs on teams of ranks, which are made once for each shape of mesh."""

    def __init__(self) -> None:
        self._teams: dict[int, Team] = {}
        self._meshes: dict[tuple[int, ...], list[DeviceMesh]] = {}

    def run(self, program: Program) -> list[list[Trace]]:
        """Return a trace for each run of the program and each rank."""
        meshes = self.meshes_of(program.mesh)
        clear_caches()
        compiled: list[Compiled | None] = [None] * len(meshes)
        traces: list[list[Trace]] = []
        for run, numbers in enumerate(program.runs):
            if program.compiled and run == 1:
                torch.compiler.reset()
                compiled = [
                    compiled_lines(program, RankHelpers(mesh).namespace(), True) for mesh in meshes
                ]
            traces.append(self._run_once(program, numbers, meshes, compiled))
        return traces

    def meshes_of(self, shape: tuple[int, ...]) -> list[DeviceMesh]:
        """Return the mesh of each rank."""
        size = math.prod(shape)
        if size not in self._teams:
            self._teams[size] = Team(size)
        if shape not in self._meshes:
            team = self._teams[size]
            self._meshes[shape] = [team.mesh(rank, shape) for rank in range(size)]
        return self._meshes[shape]

    def _run_once(
        self,
        program: Program,
        numbers: dict[str, Any],
        meshes: list[DeviceMesh],
        compiled: list[Compiled | None],
    ) -> list[Trace]:
        traces = [Trace() for _ in meshes]

        def body(rank: int) -> None:
            run_rank(program, numbers, meshes[rank], traces[rank], compiled[rank])

        outcomes = self._teams[len(meshes)].run(body)
        for trace, outcome in zip(traces, outcomes, strict=True):
            if outcome.error is not None and trace.error is None:
                trace.error, trace.failed_line = outcome.error, len(program.lines)
        return traces


def run_rank(
    program: Program,
    numbers: dict[str, Any],
    mesh: DeviceMesh,
    trace: Trace,
    compiled: Compiled | None = None,
) -> None:
    """Run on one rank; stops at the first line that raises."""
    env = {**RankHelpers(mesh).namespace(), **numbers}
    hidden = set(env)
    for name, given in program.inputs.items():
        if given.placements:
            env[name], trace.buffers[name] = distributed_input(given, mesh)
        else:
            env[name], trace.buffers[name] = plain_input(given)
    count = 0
    if compiled is not None:
        function, count = compiled
        try:
            env.update(function(*(env[name] for name in [*program.inputs, *numbers])))
        except Exception as error:
            trace.failed_line, trace.error = count - 1, error
    for number in range(count, len(program.lines)):
        if trace.error is not None:
            break
        try:
            exec(code_of(program.lines[number]), env)
        except Exception as error:
            trace.failed_line, trace.error = number, error
    for name, value in env.items():
        if name not in hidden and not name.startswith("__"):
            trace.env[name] = shown(value)


def shown(value: Any) -> Any:
    """Return what is seen of a value; lists stay lists."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [shown(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, DTensor):
        try:
            local = value.to_local().detach()
        except Exception as error:
            return Shown("unreadable", error)
        return Shown(
            "distributed",
            local,
            tuple(value.shape),
            value.dtype,
            value.global_layout,
            value.spec.tensor_meta.dtype,
            value.requires_grad,
        )
    if isinstance(value, Tensor):
        own = value.detach()
        return Shown(
            "plain", own, tuple(own.shape), own.dtype, None, own.dtype, value.requires_grad
        )
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        return [shown(tensor) for _, tensor in tensors]
    if isinstance(value, types.FunctionType | type):
        return Shown("other", None)
    return Shown("other", value)
