"""Loading into states on the meta device, which have no memory yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.tensors import transfer
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Replicate, Shard
from dtckpt.errors import Corrupt, LayoutMismatch
from dtckpt.storage import MemoryStore
from dtckpt.storage.arena import prefer_huge_pages

from ...ranks import run_ranks


def saved(state: dict[str, Any]) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return store


class Net(nn.Module):
    """A module with buffers, a frozen parameter and tied ones."""

    persistent: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.norm.weight.requires_grad_(False)
        self.register_buffer("persistent", torch.arange(3.0))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def on_meta() -> Net:
    """The module without memory."""
    with torch.device("meta"):
        return Net()


def test_a_module_gets_real_parameters() -> None:
    net = Net()
    nn.init.normal_(net.norm.weight)
    fresh = on_meta()
    fresh.head.bias.role = "bias"  # pyright: ignore
    report = dcp.load({"net": fresh}, saved({"net": net}))
    for (name, loaded), (_, expected) in zip(
        fresh.state_dict().items(), net.state_dict().items(), strict=True
    ):
        assert loaded.device.type == "cpu", name
        assert torch.equal(loaded, expected), name
    assert fresh.head.weight is fresh.embed.weight, "tied parameters stay one"
    assert not fresh.norm.weight.requires_grad
    assert fresh.head.bias.requires_grad
    assert fresh.head.bias.role == "bias"  # pyright: ignore
    assert isinstance(fresh.embed.weight, nn.Parameter)
    assert fresh.table.is_meta, "not in the state dict: left to the user"
    assert report.missing == ()
    fresh.head(fresh.norm(fresh.embed(torch.tensor([1, 2])))).sum().backward()
    assert fresh.embed.weight.grad is not None


def test_modules_that_are_partly_on_meta_keep_their_other_parameters() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fresh: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    kept = fresh[0].weight
    dcp.load({"net": fresh}, saved({"net": net}))
    assert fresh[0].weight is kept
    assert torch.equal(fresh[0].weight, net[0].weight)
    assert torch.equal(fresh[1].weight, net[1].weight)


def test_what_is_not_loaded_stays_on_meta() -> None:
    net = nn.Linear(3, 3)
    fresh = nn.Linear(3, 3, device="meta")
    dcp.load({"net": fresh}, saved({"net": net}), select="net/bias")
    assert fresh.weight.is_meta
    assert torch.equal(fresh.bias, net.bias)
    other = nn.Linear(3, 3, device="meta")
    report = dcp.load({"net": other}, saved({"net": {"weight": net.weight}}), strict=False)
    assert report.missing == ("net/bias",)
    assert other.bias.is_meta
    assert torch.equal(other.weight, net.weight)


def test_leaves_in_containers_are_replaced() -> None:
    store = saved({"a": torch.ones(3), "b": [torch.ones(2), 1], "c": (torch.ones(2, 3).T, 2)})
    tensor = torch.empty(3, device="meta")
    state: dict[str, Any] = {
        "a": nn.Parameter(tensor),
        "b": [torch.empty(2, device="meta"), 0],
        "c": (torch.empty(2, 3, device="meta").T, 0),
    }
    parameter = state["a"]
    dcp.load(state, store)
    assert isinstance(state["a"], nn.Parameter)
    assert state["a"] is not parameter
    assert state["a"].tolist() == [1, 1, 1]
    assert state["b"][0].tolist() == [1, 1]
    assert state["c"][0].stride() == (1, 3), "strides are kept"
    assert state["c"][0].tolist() == [[1, 1]] * 3
    assert state["c"][1] == 2


def test_tied_leaves_become_one_tensor() -> None:
    one = torch.empty(3, device="meta")
    store = saved({"a": torch.ones(3), "b": torch.ones(3)})
    state = {"a": one, "b": one.detach()}
    dcp.load(state, store)
    assert state["a"] is state["b"]
    assert state["a"].tolist() == [1, 1, 1]
    differing = saved({"a": torch.ones(3), "b": torch.zeros(3)})
    with pytest.raises(LayoutMismatch, match="different values for the two") as failure:
        dcp.load({"a": one, "b": one}, differing)
    assert failure.value.overwritten == (), "nothing that the caller can see"


def test_an_optimizer_over_parameters_without_memory() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store = saved({"opt": optimizer, "net": net})
    fresh = nn.Linear(3, 2, device="meta")
    other = torch.optim.AdamW(fresh.parameters())
    dcp.load({"opt": other, "net": fresh}, store)
    assert other.param_groups[0]["params"] == [fresh.weight, fresh.bias]
    for net_, optimizer_ in ((net, optimizer), (fresh, other)):
        optimizer_.zero_grad()
        net_(torch.ones(1, 3)).sum().backward()
        optimizer_.step()
    assert torch.equal(fresh.weight, net.weight)


def test_the_dtype_of_the_module_counts() -> None:
    net = nn.Linear(3, 2)
    fresh = nn.Linear(3, 2, device="meta", dtype=torch.bfloat16)
    report = dcp.load({"net": fresh}, saved({"net": net}), dtype_policy="cast")
    assert torch.equal(fresh.weight, net.weight.bfloat16())
    assert len(report.cast) == 2


def test_no_memory_before_the_load_is_certain_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = torch.empty_like

    def count(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", count)
    store = saved({"net": nn.Linear(3, 2), "more": 1})
    fresh = nn.Linear(3, 2, device="meta")
    with pytest.raises(LayoutMismatch, match="not asked for: more"):
        dcp.load({"net": fresh}, store)
    with pytest.raises(LayoutMismatch, match="saved as"):
        dcp.load({"net": nn.Linear(4, 2, device="meta")}, store, strict=False)
    assert made == []
    assert fresh.weight.is_meta
    dcp.load({"net": fresh}, store, strict=False)
    assert len(made) == 2


def test_a_failed_read_leaves_the_module_as_it_was() -> None:
    store = saved({"net": nn.Linear(30, 20)})
    data = next(info.name for info in store.list() if info.name.endswith(".safetensors"))
    raw = bytearray(store.read(data))
    raw[4096 + 100] ^= 1
    damaged = MemoryStore()
    for info in store.list():
        content = bytes(raw) if info.name == data else store.read(info.name)
        damaged.publish(info.name, content, overwrite=False)
    fresh = nn.Linear(30, 20, device="meta")
    with pytest.raises(Corrupt) as failure:
        dcp.load({"net": fresh}, damaged)
    assert fresh.weight.is_meta
    assert failure.value.overwritten == ()


class Renaming(nn.Module):
    """A module whose state dict holds copies, which cannot be told to be its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, device="meta"))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy."""
        return {"weight": self.weight.clone()}


def test_modules_that_hide_their_parameters_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="none of its parameters and buffers"):
        dcp.load({"net": Renaming()}, saved({"net": {"weight": torch.ones(3)}}))


def test_distributed_parameters() -> None:
    weight, bias = torch.randn(8, 3), torch.randn(8)
    store = saved({"net": {"weight": weight, "bias": bias}})

    def load(rank: int, group: Any) -> Any:
        mesh = DeviceMesh("cpu", Mesh((2,)), rank=rank, groups=[group])
        net = nn.Linear(3, 8, device="meta")
        for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
            rows = 4 if name == "weight" else 8
            local = getattr(net, name)[:rows].detach()
            shape = tuple(getattr(net, name).shape)
            tensor = DTensor.from_local(local, mesh, [placement], shape=shape)
            setattr(net, name, nn.Parameter(tensor))
        assert net.weight.is_meta
        dcp.load({"net": net}, store, process_group=group)
        assert isinstance(net.weight, DTensor)
        assert isinstance(net.weight, nn.Parameter)
        assert net.weight.placements == (Shard(0),)
        return net.weight.to_local().detach(), net.bias.to_local().detach()  # pyright: ignore

    found = run_ranks(2, load)
    assert torch.equal(torch.cat([local for local, _ in found]), weight)
    assert all(torch.equal(local, bias) for _, local in found)


def test_large_tensors_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def note(address: int, size: int) -> None:
        asked.append((address, size))
        prefer_huge_pages(address, size)

    monkeypatch.setattr(transfer, "prefer_huge_pages", note)
    store = MemoryStore()
    whole = {"large": torch.randn(2048, 1024), "small": torch.randn(4, 4)}
    dcp.save(whole, store)
    state = {name: torch.empty(t.shape, device="meta") for name, t in whole.items()}
    dcp.load(state, store)
    assert asked == [(state["large"].data_ptr(), 8 << 20)]
    assert all(torch.equal(state[name], t) for name, t in whole.items())
    large = dcp.open(store)["large"][...]
    assert asked[1:] == [(large.data_ptr(), 8 << 20)]
    assert torch.equal(large, whole["large"])
    empty = torch.empty(2048, 1024)
    dcp.load({"large": empty}, store, strict=False)
    assert asked[2:] == [(empty.data_ptr(), 8 << 20)]
    assert torch.equal(empty, whole["large"])


def test_huge_pages_may_be_refused() -> None:
    prefer_huge_pages(1 << 20, 3)  # nothing is there
