"""Models of DTensors under torch.compile. Run by test_compile, one process per rank."""

# pyright: reportPrivateUsage=false
# The compiler counts its graphs in a private module.

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..processes import import_compiler, join_group, leave_group
from .hidden import dtensor, experimental, fsdp, parallel, traffic

WIDTH, HEADS, TOKENS = 16, 2, 12


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token has found."""
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and two layers, each beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what was added."""
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


def tensor_parallel(blocks: nn.ModuleList, mesh: Any) -> None:
    """Split layers over the ranks, activations between them along the sequence."""
    shard, whole = dtensor.Shard(1), dtensor.Replicate()
    plan: dict[str, Any] = {
        "*.first": parallel.SequenceParallel(),
        "*.second": parallel.SequenceParallel(),
        "*.attention": parallel.PrepareModuleInput(
            input_layouts=(shard,), desired_input_layouts=(whole,)
        ),
        "*.attention.o": parallel.RowwiseParallel(output_layouts=shard),
        "*.up": parallel.ColwiseParallel(input_layouts=shard),
        "*.down": parallel.RowwiseParallel(output_layouts=shard),
        **{f"*.attention.{name}": parallel.ColwiseParallel() for name in "qkv"},
    }
    parallel.parallelize_module(blocks, mesh, plan)


def sharded(blocks: nn.ModuleList, mesh: Any) -> None:
    """Shard the parameters of each block."""
    for block in blocks:
        fsdp.fully_shard(block, mesh=mesh)


def distributed(blocks: nn.ModuleList, mesh: Any) -> None:
    """Distribute parameters, unevenly here and there, and nothing else."""
    for name, parameter in list(blocks.named_parameters()):
        path, _, own = name.rpartition(".")
        placement = dtensor.Shard(0) if parameter.ndim == 2 else dtensor.Replicate()
        made = dtensor.distribute_tensor(parameter.detach(), mesh, [placement])
        setattr(blocks.get_submodule(path), own, nn.Parameter(made))


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, dtensor.DTensor) else tensor


def noting(kinds: list[str]) -> Any:
    """Return a context that notes collectives. A mode would do, but keeps Dynamo from recording."""

    class Observer(traffic.Observer):
        def before(self, collective: Any) -> None:
            kinds.append(collective.kind)

    return traffic.observing([Observer()])


def trained(
    treat: Callable[[nn.ModuleList, Any], None], given: Callable[[Tensor], Any], backend: str
) -> tuple[int, int]:
    """Compare steps of treated blocks with one device; return numbers of graph breaks and graphs.

    Graphs communicate no more often than the blocks that they were recorded of.
    """
    eager = steps(treat, given, None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = steps(treat, given, backend)
    assert all(len(one) <= len(other) for one, other in zip(compiled, eager, strict=True))
    counters = torch._dynamo.utils.counters
    return len(counters["graph_break"]), counters["stats"]["unique_graphs"]


def steps(
    treat: Callable[[nn.ModuleList, Any], None], given: Callable[[Tensor], Any], backend: str | None
) -> list[list[str]]:
    """Compare steps of treated blocks with one device; return what was sent in each."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()])
    reference = nn.ModuleList([Block(), Block()])
    reference.load_state_dict(blocks.state_dict())
    treat(blocks, mesh)
    for block in blocks:
        if backend is not None:
            block.compile(backend=backend)
    optimizers = [torch.optim.SGD(b.parameters(), lr=0.1) for b in (blocks, reference)]
    counted: list[list[str]] = []
    for step in range(2):
        x = torch.linspace(-1, 1 + step, 3 * TOKENS * WIDTH).view(3, TOKENS, WIDTH).sin()
        expected = reference[1](reference[0](x))
        counted.append([])
        with noting(counted[-1]):
            found = blocks[1](blocks[0](given(x)))
            (found.square().sum() / expected.numel()).backward()
        torch.testing.assert_close(whole(found), whole(given(expected)))
        expected.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(blocks.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(found), expected)
    return counted


def models(backend: str) -> None:
    """Train under every way of treating a model."""

    def replicated(x: Tensor) -> Any:
        return dtensor.DTensor.from_local(x, mesh, [dtensor.Replicate()])

    def own_part(x: Tensor) -> Tensor:
        return x.chunk(mesh.size(), 1)[mesh.get_local_rank()]

    def same(x: Tensor) -> Tensor:
        return x

    ways: dict[str, tuple[Callable[[nn.ModuleList, Any], None], Callable[[Tensor], Any]]] = {
        "distributed": (distributed, replicated),
        "tensor parallel": (tensor_parallel, own_part),
        "sharded": (sharded, same),
    }
    for name, (treat, given) in ways.items():
        print(name, *trained(treat, given, backend))


def calls(backend: str) -> None:
    """Compare functions of DTensors, and what their graphs take for granted."""
    rows, columns = [dtensor.Shard(0)], [dtensor.Shard(1)]
    x = dtensor.distribute_tensor(torch.arange(24.0).view(4, 6), mesh, rows)
    y = torch.arange(6.0).requires_grad_()

    def compiled(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return torch.compile(function, backend=backend)

    functions: dict[str, Callable[[Any, Any], Any]] = {
        "redistribute": lambda x, _: x.redistribute(*on_mesh, placements=columns) * 2,
        "to_local": lambda x, _: x.redistribute(placements=columns).sin().to_local(),
        "from_local": lambda x, y: dtensor.DTensor.from_local(y, x.device_mesh, whole_here) * x,
        "parts": lambda x, y: dtensor.DTensor.from_local(y, mesh, rows) + x.sum(),
        "ask": lambda x, _: x * 2 if x.placements[0].is_shard(0) else x,
        "reshape": lambda x, _: x.redistribute(placements=columns).view(-1) + 1,
        "write": _write,
        "dropout": lambda x, _: F.dropout(x, 0.5),
    }
    whole_here = [dtensor.Replicate()]
    on_mesh = [] if torch.__version__ < "2.13" else [mesh]  # which older ones take for no argument
    for name, function in functions.items():
        torch._dynamo.reset()
        run = torch.compile(function, backend=backend, fullgraph=True)
        state = dtensor.random.get_rng_state(mesh)
        expected = [function(x, y) for _ in range(2)]
        dtensor.random.set_rng_state(state, mesh)
        for one in expected:
            found = run(x, y)
            assert torch.equal(whole(found), whole(one)), name
            assert found.requires_grad == one.requires_grad, name
            assert getattr(found, "placements", None) == getattr(one, "placements", None), name
    torch._dynamo.reset()
    run = compiled(lambda x, _: x * x.sum().item())  # breaks, and goes on
    assert torch.equal(whole(run(x, y)), whole(x) * 276)
    run = compiled(lambda x, y: x + y.view(1, 6))
    assert torch.equal(whole(run(x, y)), whole(x) + y)
    run = compiled(lambda x, _: (x * 2).full_tensor())
    for other in (x, x.redistribute(placements=columns), x[:3], x.view(6, 4)):  # recorded anew
        assert torch.equal(run(other, y), whole(other) * 2)
    run = compiled(lambda x, p: x.redistribute(placements=p).to_local())
    for placements in (columns, rows, whole_here, columns):
        assert torch.equal(run(x, placements), x.redistribute(placements=placements).to_local())
    run = compiled(functions["parts"])
    try:
        run(x, torch.ones(3 + mesh.get_local_rank()))
    except Exception as error:
        print("uneven parts:", str(error).splitlines()[0])


def checkpointing(backend: str) -> None:
    """Compare checkpointed functions that draw and send; those that graphs refuse say so."""
    x = dtensor.distribute_tensor(torch.randn(4, 6), mesh, [dtensor.Shard(0)]).requires_grad_()

    def function(x: Any) -> Any:
        return F.dropout(x.redistribute(placements=[dtensor.Shard(1)]).exp(), 0.5).sin()

    state = dtensor.random.get_rng_state(mesh)
    torch._dynamo.reset()
    grads: list[Tensor] = []
    for run in (function, torch.compile(function, backend=backend)):
        dtensor.random.set_rng_state(state, mesh)
        checkpoint(run, x, use_reentrant=False).sum().backward()
        grads.append(whole(x.grad))
        x.grad = None
    assert torch.equal(*grads)

    def outer(x: Any) -> Any:
        return checkpoint(function, x, use_reentrant=False)

    try:
        torch.compile(outer, backend=backend, fullgraph=True)(x)
    except Exception as error:
        print("recomputed:", "Compile what is checkpointed" in str(error))


def _write(x: Any, _: Tensor) -> Any:
    copy = x.clone()
    copy[1] = 3.0
    return copy.add_(1)


def made(inputs: Tensor, module: nn.Module, mesh: Any) -> Tensor:
    """Return ``inputs`` plus one, by way of what makes distributed tensors."""
    dtensor.distribute_module(module, mesh)
    return inputs * 2 + dtensor.ones(3, device_mesh=mesh).full_tensor() - inputs


def makers(backend: str) -> None:
    """Compare calls that graphs break at."""
    inputs = torch.arange(3.0)
    found = torch.compile(made, backend=backend)(inputs, nn.Linear(2, 2), mesh)
    torch.testing.assert_close(found, inputs + 1)
    attend = torch.compile(_attended, backend=backend)
    x = torch.linspace(-1, 1, 64).view(1, 2, 8, 4).sin()
    torch.testing.assert_close(attend(x), _attended(x))
    with experimental.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        expected, found = _attended(x), attend(x)  # which was recorded without the other ranks
        torch.testing.assert_close(found, expected)
        assert found.shape[2] * mesh.size() == 8


def _attended(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1


before_fork = import_compiler


if __name__ == "__main__":
    join_group()
    mesh = dtensor.DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    for part in sys.argv[3:]:
        {"models": models, "calls": calls, "checkpointing": checkpointing, "makers": makers}[part](
            sys.argv[2]
        )
    leave_group()
