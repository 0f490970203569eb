"""What a load leaves without values or untied is told, and the remedies lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import torch_private
from dtckpt.storage import MemoryStore

X = torch.tensor([1, 2, 3])


class Rope(nn.Module):
    """Holds a buffer of each kind, and a tensor that is none."""

    inv: torch.Tensor
    kept: torch.Tensor

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("inv", 1 / torch.arange(1.0, 5.0), persistent=persistent)
        self.register_buffer("kept", torch.arange(4.0))
        self.plain = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inv + self.kept + self.plain


class Plain(nn.Module):
    """Without what no checkpoint has but for a buffer."""

    inv: torch.Tensor

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("inv", 1 / torch.arange(1.0, 5.0), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inv


class Net(nn.Module):
    """A language model in little, its ends tied."""

    def __init__(self, *, tied: bool = True, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.rope = inner or Rope()
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.head(self.rope(self.emb(i)))


def made(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def on_meta(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


def saved(**state: Any) -> MemoryStore:
    store = MemoryStore()
    ckpt.save(state, store)
    return store


def test_tensors_that_no_checkpoint_has_are_told(caplog: pytest.LogCaptureFixture) -> None:
    net = made()
    fresh = on_meta()
    report = ckpt.load({"m": fresh}, saved(m=net))
    assert set(report.without_values) == {"m/rope.inv", "m/rope.plain"}
    assert "without values, on the meta device: m/rope.inv, m/rope.plain" in str(report)
    assert report.untied == {}
    assert fresh.head.weight is fresh.emb.weight
    (record,) = caplog.records
    assert "m/rope.inv, m/rope.plain" in record.getMessage()
    assert "to_empty" not in record.getMessage()
    # The remedy of assigning.
    fresh.rope.inv, fresh.rope.plain = Rope().inv, Rope().plain
    assert torch.equal(fresh(X), net(X))


def test_a_module_made_on_its_device_has_all(caplog: pytest.LogCaptureFixture) -> None:
    net = made()
    store = saved(m=net)
    fresh = made(1)
    report = ckpt.load({"m": fresh}, store)
    assert torch.equal(fresh(X), net(X))
    # A part of it alone, in which constructors compute something.
    partly = on_meta()
    partly.rope = Rope()
    other = ckpt.load({"m": partly}, store)
    assert torch.equal(partly(X), net(X))
    assert report.without_values == other.without_values == ()
    assert not caplog.records


def test_persistent_buffers_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    net = made(inner=Plain(persistent=True))
    with torch.device("meta"):
        fresh = Net(inner=Plain(persistent=True))
    assert ckpt.load({"m": fresh}, saved(m=net)).without_values == ()
    assert torch.equal(fresh(X), net(X))
    assert not caplog.records


def test_what_to_empty_has_untied_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = made(inner=Plain())
    store = saved(m=net)
    with torch.device("meta"):
        fresh = Net(inner=Plain())
    fresh.to_empty(device="cpu")
    report = ckpt.load({"m": fresh}, store)
    assert report.untied == {"m/head.weight": "m/emb.weight"}
    assert "tied at the save, and not now: m/head.weight" in str(report)
    (record,) = caplog.records
    for told in ("m/head.weight to m/emb.weight", "to_empty() has untied them", "m/rope.inv"):
        assert told in record.getMessage()
    fresh.head.weight = fresh.emb.weight
    fresh.rope.inv = Plain().inv
    caplog.clear()
    again = ckpt.load({"m": fresh}, store)
    assert again.untied == {}
    assert not caplog.records
    assert torch.equal(fresh(X), net(X))


def test_untied_parameters_are_told_of_one_module_alone(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(3)
    store = saved(a=weight, b=weight, m={"x": weight}, n={"x": weight})
    given = {name: torch.zeros(3) for name in "ab"}
    assert ckpt.load(dict(given), store, select=["a", "b"]).untied == {}
    modules = {name: nn.ParameterDict({"x": nn.Parameter(torch.zeros(3))}) for name in "mn"}
    assert ckpt.load(modules, store, select=["m", "n"]).untied == {}
    assert not caplog.records


def test_what_is_left_for_another_load_is_in_the_report_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = saved(m=nn.Linear(3, 3))
    fresh = nn.Linear(3, 3, device="meta")
    assert ckpt.load({"m": fresh}, store, select="m/bias").without_values == ("m/weight",)
    assert ckpt.load({"m": fresh}, store, select="m/weight").without_values == ()
    assert not caplog.records


class Wrapper:
    """Holds a module and passes on what was loaded."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def state_dict(self) -> Any:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.net.load_state_dict(state["net"], assign=True)


def test_modules_in_wrappers_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = Wrapper(on_meta())
    report = ckpt.load({"app": wrapper}, saved(app=Wrapper(made())))
    assert set(report.without_values) == {"app.net/rope.inv", "app.net/rope.plain"}
    assert len(caplog.records) == 1


def test_an_optimizer_that_is_not_loaded_follows() -> None:
    net = nn.Linear(3, 2)
    store = saved(m=net, o=torch.optim.AdamW(net.parameters()))
    fresh = nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    ckpt.load({"m": fresh, "o": optimizer}, store, select="m")
    assert optimizer.param_groups[0]["params"] == [fresh.weight, fresh.bias]
    fresh(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(fresh.weight, net.weight)


def test_a_torch_that_shows_no_kinds_of_buffers_has_persistent_ones_only() -> None:
    class Bare:
        pass

    bare: Any = Bare()
    assert torch_private.non_persistent_buffers(bare) == set()
    assert torch_private.non_persistent_buffers(Rope()) == {"inv"}
