"""Layers that are several in one, and heads that ranks do not divide: as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import parse_rules, read_manifest
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Packed, PlacementError, Ragged, Shard
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    placement_rules,
)
from dtckpt.storage import MemoryStore
from tests.dtensor.rank_meshes import collectives, rank_mesh, run_on_mesh
from tests.ranks import axis_groups, run_ranks

HEAD = 4


class Attention(nn.Module):
    """Attention of which several queries share a head of keys and values."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        width = 12
        self.q = nn.Linear(width, heads * HEAD, dtype=torch.float64)
        self.k = nn.Linear(width, groups * HEAD, dtype=torch.float64)
        self.v = nn.Linear(width, groups * HEAD, bias=False, dtype=torch.float64)
        self.o = nn.Linear(heads * HEAD, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attended(self.q(x), self.k(x), self.v(x)))


class Fused(nn.Module):
    """The same with one projection, and one for both sides of a gate."""

    def __init__(self, parts: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        self.parts = parts
        self.qkv = nn.Linear(12, sum(parts), dtype=torch.float64)
        self.o = nn.Linear(parts[0], 12, dtype=torch.float64)
        self.gate_up = nn.Linear(12, 2 * hidden, bias=False, dtype=torch.float64)
        self.down = nn.Linear(hidden, 12, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x)
        sizes = [*self.parts]
        if not isinstance(made, DTensor) and made.shape[-1] != sum(sizes):
            ranks = sum(sizes) // made.shape[-1]
            sizes = [size // ranks for size in sizes]
        x = x + self.o(attended(*made.split(sizes, -1)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    times = q.shape[1] // max(k.shape[1], 1)
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def one_device(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    x = x.clone().requires_grad_()
    made = model(x)
    made.sin().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return made.detach(), grads, x.grad


def check(model: Any, x: Tensor, expected: tuple[Tensor, dict[str, Tensor], Tensor]) -> None:
    """Compare outputs, gradients of the input, and of all parameters."""
    x = x.clone().requires_grad_()
    found = model(x)
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(whole, expected[0])
    found.sin().sum().backward()
    torch.testing.assert_close(x.grad, expected[2])
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[1][name], msg=name)


def with_copies(store: Any, shape: tuple[int, ...], rank: int, world: Any, heads: int) -> Any:
    """Return a mesh whose last axis can be seen as heads and copies, without a default group."""
    mesh = rank_mesh(store, shape, rank, world, ("dp", "tp")[-len(shape) :])
    split = mesh.unflatten("tp", (heads, shape[-1] // heads), ("heads", "copies"))
    for axis, group in enumerate(axis_groups(store, split.layout_mesh, rank)):
        split._groups[(axis,)] = group  # pyright: ignore[reportPrivateUsage]
    return mesh


GROUPED: dict[str, Any] = {
    "q": ColwiseParallel(heads=4),
    "k": ColwiseParallel(heads=2),
    "v": ColwiseParallel(heads=2),
    "o": RowwiseParallel(heads=4),
}


def test_heads_that_are_fewer_than_ranks() -> None:
    torch.manual_seed(0)
    model, x = Attention(4, 2), torch.randn(2, 5, 12, dtype=torch.float64)
    expected, store = one_device(model, x), MemoryStore()
    model.zero_grad()
    groups: Any = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def train(rank: int, world: Any) -> None:
        mesh = with_copies(groups, (4,), rank, world, 2)
        ours: Any = parallelize_module(copy.deepcopy(model), mesh, GROUPED)
        assert ours.k.weight.to_local().shape == (HEAD, 12)
        head = model.get_parameter("k.weight")[rank // 2 * HEAD :][:HEAD]
        assert torch.equal(ours.k.weight.to_local(), head)
        check(ours, x, expected)
        rules = placement_rules(ours)
        assert "model/k.weight=S(0), R" in rules
        assert "model/q.weight=S(0), S(0)" in rules
        parse_rules(rules)
        dcp.save({"model": ours.state_dict()}, store, process_group=world)

    run_ranks(4, train)
    with dcp.open(store) as saved:
        for name, value in model.state_dict().items():
            assert torch.equal(saved[f"model/{name}"][...], value)
    tensors = read_manifest(store).tensors.values()
    written = sum(box.numel for t in tensors for rank in range(4) for box in t.chunks_of(rank))
    assert written == sum(t.numel() for t in model.state_dict().values()), "each head once"

    def go_on(mesh: DeviceMesh) -> None:
        other: Any = Attention(4, 2)
        ours: Any = parallelize_module(other, mesh, GROUPED, src_data_rank=None)
        dcp.load({"model": ours.state_dict()}, store, process_group=mesh.get_group())
        check(ours, x, expected)

    run_on_mesh((2,), go_on)


@pytest.mark.parametrize("kind", ["fused", "grouped"])
def test_sharded_data_over_it(kind: str) -> None:
    """Three steps with AdamW and clipped gradients, over modules of both kinds."""
    torch.manual_seed(0)
    parts, x = (8, 8, 8), torch.randn(4, 3, 12, dtype=torch.float64)
    model = Fused(parts, 10) if kind == "fused" else Attention(4, 1)
    plan: Any = {**GROUPED, "k": ColwiseParallel(heads=1), "v": ColwiseParallel(heads=1)}
    if kind == "fused":
        gate_up = ColwiseParallel(parts=(10, 10))
        plan = {"qkv": ColwiseParallel(parts=parts), "gate_up": gate_up}
        plan |= {"o": RowwiseParallel(), "down": RowwiseParallel()}
    groups: Any = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def train(model: nn.Module, x: Tensor, times: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (times * model(x).sin().sum()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    alone = copy.deepcopy(model)
    train(alone, x, 1)

    def body(rank: int, world: Any) -> None:
        mesh = with_copies(groups, (2, 2), rank, world, 1)
        ours: Any = parallelize_module(copy.deepcopy(model), mesh["tp"], plan)
        fully_shard(ours, mesh=mesh["dp"])
        train(ours, x.chunk(2)[mesh.get_local_rank("dp")], 2)
        for (name, one), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other.data, msg=name)

    run_ranks(4, body)


def test_heads_that_ranks_do_not_divide() -> None:
    torch.manual_seed(0)
    model, x = Attention(5, 5), torch.randn(2, 3, 12, dtype=torch.float64)
    expected = one_device(model, x)
    model.zero_grad()
    plan = {"[qkv]": ColwiseParallel(heads=5), "o": RowwiseParallel(heads=5)}

    def body(mesh: DeviceMesh) -> None:
        ours: Any = parallelize_module(copy.deepcopy(model), mesh, plan)
        assert ours.q.weight.placements == (Ragged(0, (8, 8, 4)),)
        with collectives() as seen, torch.no_grad():
            ours(x)
        assert len(seen) == 1  # the sum of what the last layer makes
        check(ours, x, expected)

    run_on_mesh((3,), body)


def test_no_rank_is_without_a_head_where_there_are_as_many() -> None:
    mesh = _mesh_of(4)
    lies = ColwiseParallel(heads=6).placements(nn.Linear(2, 12), mesh)["weight"]
    assert lies == Ragged(0, (4, 4, 2, 2))


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "remedy"),
    [
        (6, 2, 4, "use a number of ranks that divides 6"),
        (6, 3, 2, r"give 'q' heads=3, too"),
        (12, 6, 4, r"give 'q' heads=6, too"),
    ],
)
def test_groups_that_ranks_would_not_have_together(
    heads: int, groups: int, ranks: int, remedy: str
) -> None:
    model: Any = Attention(heads, groups)
    plan = {"q": ColwiseParallel(heads=heads), "[kv]": ColwiseParallel(heads=groups)}
    with pytest.raises(PlacementError, match=f"'q' has {heads} heads and 'k' {groups}.*{remedy}"):
        parallelize_module(model, _mesh_of(ranks), plan)
    assert type(model.q.weight) is nn.Parameter
    alone = {name: ColwiseParallel(heads=groups) for name in "qkv"}
    parallelize_module(model, _mesh_of(groups), alone, src_data_rank=None)


@pytest.mark.parametrize(("ranks", "local"), [(2, True), (2, False), (3, False)])
def test_fused_projections(ranks: int, local: bool) -> None:
    torch.manual_seed(0)
    parts, hidden = ((8, 8, 8), 10) if ranks == 2 else ((24, 12, 12), 7)
    model, x = Fused(parts, hidden), torch.randn(2, 3, 12, dtype=torch.float64)
    expected = one_device(model, x)
    model.zero_grad()
    heads = tuple(part // HEAD for part in parts)
    plan = {
        "qkv": ColwiseParallel(parts=parts, heads=heads, use_local_output=local),
        "o": RowwiseParallel(),
        "gate_up": ColwiseParallel(parts=(hidden, hidden), use_local_output=local),
        "down": RowwiseParallel(),
    }

    def body(mesh: DeviceMesh) -> str:
        ours: Any = parallelize_module(copy.deepcopy(model), mesh, plan)
        assert ours.qkv.weight.placements == (Packed(0, parts),)
        with collectives() as seen, torch.no_grad():
            ours(x)
        assert len(seen) == 2  # one sum for each half
        check(ours, x, expected)
        return placement_rules(ours)

    told = run_on_mesh((ranks,), body)[0]
    assert f"model/qkv.weight={Packed(0, parts)}" in told
    assert parse_rules(told)[0].placements == (Packed(0, parts),)


def test_a_tensor_with_and_without_copies_is_refused() -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 8, bias=False) for name in "kv"})
    model["v"].weight = model["k"].weight
    plan = {"k": ColwiseParallel(heads=2), "v": ColwiseParallel()}
    with pytest.raises(PlacementError, match=r"are one tensor, .* wants S\(0\) and S\(0\), R"):
        parallelize_module(model, _mesh_of(4), plan, src_data_rank=None)
    assert type(model["k"].weight) is nn.Parameter


def test_rules_for_heads_that_are_uneven_beside_copies_are_refused() -> None:
    model = nn.ModuleDict({"k": nn.Linear(4, 2), "q": nn.Linear(4, 6)})
    for name, heads in {"k": 2, "q": 6}.items():
        plan = {name: ColwiseParallel(heads=heads)}
        parallelize_module(model, _mesh_of(4), plan, src_data_rank=None)
    with pytest.raises(PlacementError, match=r"'q.weight' lies on mesh .* resharded to one mesh"):
        placement_rules(model)


def test_what_cannot_be_is_refused_before_anything_changes() -> None:
    model = Attention(4, 2)
    mesh = DeviceMesh("cpu", Mesh((3,)), rank=0)
    before = {name: id(p) for name, p in model.named_parameters()}
    for plan, told in [
        ({"k": ColwiseParallel(heads=2)}, "2 heads cannot each be on as many of 3 ranks"),
        ({"k": ColwiseParallel(heads=3)}, "8 features cannot have 3 heads of equal size"),
        ({"k": ColwiseParallel(parts=(4, 5))}, "parts that sum to 9, expected 8"),
        ({"k": ColwiseParallel(parts=(4, 4), heads=(1, 1))}, "1 heads cannot be dealt out to 3"),
        ({"o": RowwiseParallel(heads=2)}, "cannot each be on as many"),
        ({"k": ColwiseParallel(heads=1, use_local_output=False)}, "1 heads on 3 ranks are copied"),
        ({"o": RowwiseParallel(heads=1)}, "would be added up several times"),
    ]:
        with pytest.raises(PlacementError, match=told):
            parallelize_module(model, mesh, {"q": ColwiseParallel(), **plan}, src_data_rank=None)
    for module in (nn.Embedding(4, 8), nn.Conv1d(4, 8, 1)):
        for style in (ColwiseParallel(parts=(4, 4)), ColwiseParallel(heads=2)):
            with pytest.raises(PlacementError, match=r"\(\w+=...\) is for Linear, got a"):
                parallelize_module(module, mesh, style, src_data_rank=None)
    for options, told in [
        ({"heads": (2, 2)}, "a number for each of parts"),
        ({"parts": (4, 4), "heads": 2}, "need a number of heads each"),
        ({"parts": (4, -4)}, "a size of 0 or more for each part"),
    ]:
        with pytest.raises(PlacementError, match=told):
            ColwiseParallel(**options)  # pyright: ignore[reportArgumentType]
    assert before == {name: id(p) for name, p in model.named_parameters()}
    assert Shard(0) == ColwiseParallel(heads=4).placements(model.q, mesh=_mesh_of(4))["weight"]


def _mesh_of(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", Mesh((size,)), rank=0)
