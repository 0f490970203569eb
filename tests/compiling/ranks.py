"""One rank of compiled models and functions. Run by ``trial``, one process per rank."""

# pyright: reportPrivateUsage=false
# Empties the cache of torch._dynamo between cases.

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config

import dtckpt.dtensor as dtensor
from dtckpt.dtensor import random
from dtckpt.dtensor.comm.traffic import Collective, Observer, observing

from ..processes import import_compiler, join_group, leave_group
from .families import Model, size_of
from .functions import OF_A_NUMBER, make

Found = dict[str, Tensor]
Sent = list[tuple[str, ...]]


SETTINGS = {
    "recomputing": {"aggressive_recomputation": True},
    "budget": {"activation_memory_budget": 0.1},
}
"""What compilers are told besides in these modes."""


class Order(Observer):
    """Notes collectives in their order."""

    def __init__(self) -> None:
        self.sent: Sent = []

    def before(self, collective: Collective) -> None:
        """Note a collective, and what of it has to be the same on all ranks."""
        self.sent.append((collective.kind, collective.reduce_op, collective.agreed))


def whole(value: Any) -> Tensor:
    """Return all of a tensor."""
    return value.full_tensor() if isinstance(value, dtensor.DTensor) else value


def inputs_of(model: Model, mesh: Any, *, grads: bool) -> list[Any]:
    """Return new inputs of a model, distributed where there is a mesh."""
    made: list[Any] = []
    for tensor, dim in zip(model.inputs, model.dims, strict=True):
        one: Any = tensor.clone()
        if dim is not None and mesh is not None:
            placement = dtensor.Replicate() if dim < 0 else dtensor.Shard(dim)
            one = dtensor.distribute_tensor(one, mesh, [placement])
        made.append(one.requires_grad_(grads and one.is_floating_point()))
    return made


def run(
    model: Model, module: Any, call: Any, mesh: Any, *, grads: bool
) -> tuple[Found, Sent, Sent]:
    """Return the result and all gradients by name, and what was sent in each of the passes."""
    inputs, orders = inputs_of(model, mesh, grads=grads), (Order(), Order())
    module.zero_grad()
    with nullcontext() if model.context is None or mesh is None else model.context():
        with observing([orders[0]]), torch.set_grad_enabled(grads):
            result = call(*inputs)
        found = {"result": whole(result.detach())}
        if grads:
            count, shape = found["result"].numel(), found["result"].shape
            weights: Any = torch.arange(1.0, count + 1).view(shape).cos()
            if isinstance(result, dtensor.DTensor):
                weights = dtensor.distribute_tensor(weights, mesh)
            loss = (result * weights).sum()
            with observing([orders[1]]):
                loss.backward()
    named = [(f"input {index}", tensor) for index, tensor in enumerate(inputs)]
    for name, tensor in (*named, *module.named_parameters()):
        if tensor.grad is not None:
            found[f"gradient of {name}"] = whole(tensor.grad).clone()
    return found, orders[0].sent, orders[1].sent


def differences(found: Found, expected: Found) -> list[str]:
    """Return what of the results differs."""
    told = [f"{name} is on one side only" for name in sorted(expected.keys() ^ found.keys())]
    for name in sorted(expected.keys() & found.keys()):
        try:
            torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=2e-4)
        except AssertionError as error:
            told.append(f"{name}: {str(error).splitlines()[0]}")
    return told


def is_same_everywhere(value: Any) -> bool:
    """Whether all ranks give the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return all(one == every[0] for one in every)


def try_model(name: str, parts: str, mode: str, backend: str, mesh: Any) -> list[str]:
    """Return what is wrong with a compiled model, in results or in the order of collectives."""
    grads = mode != "forward"
    torch.manual_seed(0)
    model = make(name, size_of(parts, mesh.size()))
    module = deepcopy(model.module)
    model.treat(module, mesh)
    state = random.get_rng_state(mesh)
    eager, *sent = run(model, module, module, mesh, grads=grads)
    told = _ranks_that_differ(sent, "without a compiler")
    if not model.draws:
        expected, *_ = run(model, model.module, model.module, None, grads=grads)
        told += [f"without a compiler: {one}" for one in differences(eager, expected)]
    compiled = torch.compile(module, backend=backend)
    with functorch_config.patch(SETTINGS.get(mode, {})):
        for _ in range(2):  # the second time nothing is recorded
            random.set_rng_state(state, mesh)
            found, *sent = run(model, module, compiled, mesh, grads=grads)
            told += differences(found, eager)
            told += _ranks_that_differ(sent, "compiled")
    return told


def _ranks_that_differ(sent: list[Sent], how: str) -> list[str]:
    passes = zip(("forward", "backward"), sent, strict=True)
    return [
        f"{how}: ranks differ in the {name} pass, this one sent {[kind for kind, *_ in one]}"
        for name, one in passes
        if not is_same_everywhere(one)
    ]


def try_numbers(name: str, parts: str, _: str, backend: str, mesh: Any) -> list[str]:
    """Return for which numbers a compiled function of a number is wrong."""
    function = OF_A_NUMBER[name]
    x = torch.linspace(-2, 3, 3 * size_of(parts, mesh.size())).view(-1, 3).sin()
    given = dtensor.distribute_tensor(x, mesh, [dtensor.Shard(0)])
    compiled, told = torch.compile(function, backend=backend, fullgraph=True), list[str]()
    for number in (1.5, 2.5, 3.0, 4.5):
        state = random.get_rng_state(mesh)
        expected = {"result": whole(function(given, number))}
        random.set_rng_state(state, mesh)
        found = {"result": whole(compiled(given, number))}
        told += [f"{number}: {one}" for one in differences(found, expected)]
    return told


def main() -> None:
    """Try the cases of the command line, and print what is wrong with each."""
    join_group()
    mesh = dtensor.DeviceMesh("cpu", list(range(dist.get_world_size())))
    for case in json.loads(sys.argv[1]):
        start = time.process_time()
        torch._dynamo.reset()
        attempt: Any = try_numbers if case[0] in OF_A_NUMBER else try_model
        try:
            told = attempt(*case, mesh)
        except Exception as error:
            traceback.print_exc()
            told = [f"{type(error).__name__}: {str(error)[:300]}"]
            print(json.dumps([case, told, time.process_time() - start]), flush=True)
            sys.exit(1)
        print(json.dumps([case, told, time.process_time() - start]), flush=True)
    leave_group()


before_fork = import_compiler


if __name__ == "__main__":
    main()
