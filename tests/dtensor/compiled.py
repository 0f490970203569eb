"""A model of DTensors under torch.compile. Run by test_compile, one process per rank."""

# pyright: reportPrivateUsage=false
# Takes the private way of marking functions away, to see the public one work.

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..processes import join_group, leave_group


class Net(nn.Module):
    """Two linear layers with plain tensors before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, inputs: Tensor, mesh: Any) -> Tensor:
        """Return the outputs of plain ``inputs`` as a plain tensor."""
        scaled = (inputs * 2 - 1).sin()
        if mesh is not None:
            scaled = dtensor.DTensor.from_local(scaled, mesh, [dtensor.Replicate()])
        hidden = torch.relu(self.first(scaled))
        outputs: Any = self.second(hidden)
        if mesh is not None:
            outputs = outputs.redistribute(placements=[dtensor.Replicate()]).full_tensor()
        return outputs.square().mean() + outputs.abs().sum()


def distributed(net: Net, mesh: Any) -> Net:
    """Return the net with its parameters distributed."""
    for module in (net.first, net.second):
        for name, parameter in list(module.named_parameters()):
            made = dtensor.distribute_tensor(parameter.detach(), mesh, [dtensor.Shard(0)])
            setattr(module, name, nn.Parameter(made))
    return net


def made(inputs: Tensor, module: nn.Module, mesh: Any) -> Tensor:
    """Return ``inputs`` plus one, by way of what makes distributed tensors."""
    dtensor.distribute_module(module, mesh)
    return inputs * 2 + dtensor.ones(3, device_mesh=mesh).full_tensor() - inputs


def check(backend: str, mesh: Any) -> list[str]:
    """Compare two steps with one device; return the reasons of the graph breaks."""
    reference, net = Net(), Net()
    net.load_state_dict(reference.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(distributed(net, mesh), backend=backend)
    ours = torch.optim.SGD(net.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        inputs = torch.linspace(-1, 1 + step, 42).view(7, 6)
        found, expected = compiled(inputs, mesh), reference(inputs, None)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
        for parameter, whole in zip(net.parameters(), reference.parameters(), strict=True):
            gradient: Any = parameter.grad
            torch.testing.assert_close(gradient.full_tensor(), whole.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    inputs = torch.arange(3.0)
    found = torch.compile(made, backend=backend)(inputs, nn.Linear(2, 2), mesh)
    torch.testing.assert_close(found, inputs + 1)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 1, counters  # plain parts are compiled
    return [str(reason).splitlines()[0] for reason in counters["graph_break"]]


def main(backend: str) -> None:
    """Check a backend."""
    join_group()
    assert "torch._dynamo" not in sys.modules
    mesh = dtensor.DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    torch.manual_seed(0)
    importlib.import_module("torch._dynamo")
    print(backend, sorted(set(check(backend, mesh))))
    leave_group()


if __name__ == "__main__":
    torch_c: Any = torch._C
    frames = torch_c._dynamo.eval_frame
    strategy = frames.set_code_exec_strategy
    if sys.argv[1] == "public":
        del frames.set_code_exec_strategy
    dtensor = importlib.import_module("dtckpt.dtensor")
    importlib.import_module("dtckpt.dtensor.dtensor")
    frames.set_code_exec_strategy = strategy
    main(sys.argv[2])
