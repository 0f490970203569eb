"""``distribute_module``, and state dicts of modules with distributed parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Ragged,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    randn,
    strict,
)
from dtckpt.errors import PlacementError, UnsupportedOp

from ..ranks import RanksFailed
from .rank_meshes import assert_holds, collectives, run_on_mesh, scattered


class Net(nn.Module):
    """An embedding tied to a head, a norm with buffers, and a weight that is not contiguous."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.zeros(4, 3).t(), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for value in self.state_dict().values():
                if value.is_floating_point():
                    value.copy_(
                        torch.linspace(start + 0.1, start + 1, value.numel()).view(value.shape)
                    )

    def forward(self, index: Tensor) -> Tensor:
        hidden = self.norm(self.embed(index)) + self.scale.sum(0)
        return self.head(hidden)


def split_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Embedding):
        weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)] * mesh.ndim)
        module.register_parameter("weight", nn.Parameter(weight))


def test_hooks_take_the_module_or_leave_it_out() -> None:
    mesh = DeviceMesh("cpu", [0], rank=0)

    class Hook:
        def __call__(self, module: nn.Module, values: Any, mesh: DeviceMesh) -> Any:
            assert isinstance(module, nn.Linear)
            return values * 3

    def three(module: nn.Module, values: Any, mesh: DeviceMesh) -> Any:
        return values * 3

    def two(values: Any, mesh: DeviceMesh) -> Any:
        return values * 3

    def doubled(inputs: Any, mesh: DeviceMesh) -> Any:
        return (distribute_tensor(inputs[0], mesh) * 2,)

    for output_fn in (three, two, Hook(), lambda *hooked: hooked[1] * 3):  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
        layer = nn.Linear(2, 2, bias=False)
        with pytest.warns(FutureWarning, match="take the module first") as told:
            distribute_module(layer, mesh, input_fn=doubled, output_fn=output_fn)  # pyright: ignore[reportUnknownArgumentType]
        assert len(told) == (2 if output_fn is two else 1)
        weight: Any = layer.weight
        found = layer(torch.ones(1, 2))
        torch.testing.assert_close(found.to_local(), 6 * weight.to_local().sum(1)[None])


def test_everything_is_replicated_by_default() -> None:
    def body(mesh: DeviceMesh) -> None:
        net = Net(start=float(mesh.get_rank()))  # rank 0 tells the values
        with mesh:
            assert distribute_module(net) is net
        plain = dict(Net().state_dict())
        assert list(net.state_dict()) == list(plain)
        for name, value in net.state_dict().items():
            assert isinstance(value, DTensor)
            assert value.placements == (Replicate(),) * mesh.ndim
            assert_holds(value, plain[name])
        assert isinstance(net.seen, DTensor)
        assert isinstance(net.scale, nn.Parameter)
        assert not net.scale.requires_grad
        assert net.head.bias.requires_grad
        assert net.head.weight is net.embed.weight

    run_on_mesh((2, 2), body)


def test_partitioned_modules_compute_what_one_device_does() -> None:
    def body(mesh: DeviceMesh) -> None:
        calls: list[str] = []

        def give(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            assert module is net
            calls.append("in")
            return tuple(scattered(value, mesh, [Shard(0)]) for value in inputs)

        def take(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            calls.append("out")
            return outputs.full_tensor()

        plain, net = Net(), Net()
        distribute_module(net, mesh, split_rows, give, take)
        assert net.head.weight is net.embed.weight
        assert net.embed.weight.placements == (Shard(0),)  # pyright: ignore[reportAttributeAccessIssue]
        index = torch.tensor([0, 5, 2, 2, 3])
        found, wanted = net(index), plain(index)
        assert calls == ["in", "out"]
        torch.testing.assert_close(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            if b.grad is not None:
                assert a.grad is not None
                assert_holds(a.grad, b.grad, rtol=1e-4, atol=1e-4)

    run_on_mesh((2,), body)


def test_tied_parameters_with_other_layouts_are_refused() -> None:
    def split_both(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if name in ("embed", "head"):
            placements = [Shard(0 if name == "embed" else 1)]
            weight: Any = module.weight
            module.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, placements))

    with pytest.raises(RanksFailed, match="tied"):
        run_on_mesh((2,), lambda mesh: distribute_module(Net(), mesh, split_both))
    with pytest.raises(PlacementError, match="no mesh"):
        distribute_module(Net())


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_plain_and_distributed_tensors(assign: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        net, other = distribute_module(Net(), mesh, split_rows), Net(start=3.0)
        before = dict(net.named_parameters())
        if assign:
            source = distribute_module(Net(start=3.0), mesh, split_rows).state_dict()
        else:
            source = other.state_dict()
        net.load_state_dict(source, assign=assign)
        for name, value in net.state_dict().items():
            assert_holds(value, other.state_dict()[name])
        assert net.embed.weight.placements == (Shard(0),)  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in net.named_parameters():
            assert isinstance(value, nn.Parameter)
            assert (value is before.get(name)) is not assign
        plain = Net()
        plain.load_state_dict({k: v.full_tensor() for k, v in net.state_dict().items()})
        assert torch.equal(plain.embed.weight, other.embed.weight)

    run_on_mesh((2,), body)


def test_state_dicts_that_differ_between_ranks_raise_on_all_of_them() -> None:
    def body(mesh: DeviceMesh) -> None:
        net = distribute_module(Net(), mesh, split_rows)
        net.load_state_dict(Net(start=float(mesh.get_rank())).state_dict())

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((2,), body)
    assert sorted(failed.value.errors) == [0, 1]


def test_sizes_are_checked_against_the_whole() -> None:
    def body(mesh: DeviceMesh) -> None:
        net = distribute_module(nn.Linear(4, 6), mesh)
        with pytest.raises(RuntimeError, match="size mismatch"):
            net.load_state_dict({"weight": torch.zeros(3, 4), "bias": torch.zeros(6)})
        assert net(randn(2, 4, device_mesh=mesh, placements=[Shard(0)])).shape == (2, 6)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoders_in_eval_mode(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    packing = nn.TransformerEncoder(layer, 1, enable_nested_tensor=not norm_first).eval()
    plain = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    plain.load_state_dict(packing.state_dict())
    inputs = torch.randn(4, 5, 8)
    padding = torch.arange(5).expand(4, 5) >= torch.tensor([[5], [3], [4], [2]])
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def run(net: Any, attention: Any, rows: Tensor, padding: Tensor, later: Tensor) -> list[Tensor]:
        with torch.no_grad():
            padded = net(rows, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
            both = net.layers[0](rows, src_mask=later, src_key_padding_mask=padding)
            return [padded, both, net(rows, mask=later), *attention(rows, rows, rows)]

    expected = run(plain, attention, inputs, padding, later)
    nets = [copy.deepcopy((packing, attention)) for _ in range(2)]

    def body(mesh: DeviceMesh) -> None:
        net, attend = (distribute_module(each, mesh) for each in nets[mesh.get_rank()])
        rows, mask = (scattered(each, mesh, [Shard(0)]) for each in (inputs, padding))
        with strict():
            found = run(net, attend, rows, mask, scattered(later, mesh, [Replicate()]))
        for one, whole in zip(found, expected, strict=True):
            assert_holds(one, whole, rtol=1e-4, atol=1e-5)

    run_on_mesh((2,), body)


def test_sparse_gradients_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        net = distribute_module(nn.Embedding(5, 3, sparse=True), mesh, split_rows)
        index = scattered(torch.tensor([1, 3]), mesh, [Replicate()])
        with pytest.raises(UnsupportedOp, match="sparse=False"):
            net(index).sum().backward()

    run_on_mesh((2,), body)


def test_experts_that_are_split_raggedly_stay_where_they_are() -> None:
    """Ranks have experts of their own number, and compute with them alone."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(6, 4, 8))
            self.bias = nn.Parameter(torch.randn(6, 1, 8))
            self.down = nn.Parameter(torch.randn(6, 8, 4))

        def forward(self, x: Any) -> Any:
            return torch.bmm(torch.baddbmm(self.bias, x, self.up).relu(), self.down)

    plain = Experts()
    x = torch.randn(6, 5, 4)
    expected = plain(x)
    expected.square().sum().backward()
    split = Ragged(0, (1, 0, 5))

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            laid_out = distribute_tensor(parameter.detach(), mesh, [split])
            setattr(module, key, nn.Parameter(laid_out))

    def body(mesh: DeviceMesh) -> None:
        module = distribute_module(copy.deepcopy(plain), mesh, partition)
        tokens = scattered(x, mesh, [split])
        with strict(), collectives() as issued:
            found = module(tokens)
            (found * found).sum().to_local().backward()
        assert not issued
        assert_holds(found, expected.detach(), rtol=1e-4, atol=1e-4)
        for mine, whole in zip(module.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert whole.grad is not None
            assert_holds(mine.grad, whole.grad, rtol=1e-4, atol=1e-4)

    run_on_mesh((3,), body)
