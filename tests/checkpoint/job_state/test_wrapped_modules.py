"""Compiled, checkpointed, averaged and spread modules are saved under the names of plain ones."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.optimizers.unwrapping import plain_names
from dtckpt.errors import LayoutMismatch

wrappers: Any = importlib.import_module(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    made = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), inner)
    made[0].weight.requires_grad_(False)
    return made


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def with_part(wrap: Callable[[nn.Module], Any]) -> Callable[[Any], Any]:
    def made(module: Any) -> Any:
        module[2] = wrap(module[2])
        return module

    return made


def remade(module: nn.Module) -> Any:
    return wrappers.checkpoint_wrapper(module)


def spread(module: nn.Module) -> Any:
    return nn.DataParallel(module)  # without devices it calls the module; DDP has the same names


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda module: module,
    "compiled": compiled,
    "with a part that is both": with_part(lambda part: compiled(remade(part))),
    "spread": spread,
    "compiled and spread": lambda module: spread(compiled(with_part(remade)(module))),
}


def job(kind: str, seed: int) -> dict[str, Any]:
    model = KINDS[kind](net(seed))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(parameters, lr=0.1)}


def train(state: dict[str, Any]) -> list[float]:
    losses: list[float] = []
    for step in range(2):
        batch = torch.arange(12.0).view(4, 3) * (step + 1)
        with torch.compiler.set_stance("force_eager"):  # names are what matters here
            loss = state["model"](batch).square().sum()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Every kind after two steps, and the losses of the next two."""
    folder = tmp_path_factory.mktemp("wrapped")
    losses: list[list[float]] = []
    for kind in KINDS:
        state = job(kind, 1)
        train(state)
        ckpt.save(state, folder / kind)
        losses.append(train(state))
    assert all(told == losses[0] for told in losses)
    return folder, losses[0]


def test_names_are_those_of_the_plain_module(saved: tuple[Path, list[float]]) -> None:
    folder, _ = saved
    names = {kind: sorted(ckpt.open(folder / kind)) for kind in KINDS}
    assert all(told == names["plain"] for told in names.values())
    assert "model/2.1.running_mean" in names["plain"]


def test_each_loads_into_every_other_and_trains_on(saved: tuple[Path, list[float]]) -> None:
    folder, expected = saved
    for before, after in itertools.product(KINDS, KINDS):
        state = job(after, 2)
        report = ckpt.load(state, folder / before)
        assert not report.by_position
        assert train(state) == expected, f"{before} to {after}"


def test_a_lost_moment_shows_in_the_losses(saved: tuple[Path, list[float]]) -> None:
    folder, expected = saved
    state = job("compiled", 2)
    ckpt.load(state, folder / "spread")
    next(iter(state["optimizer"].state.values()))["exp_avg"].mul_(0.99)
    assert train(state) != expected


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_what_was_saved_with_names_of_wrappers_is_found(prefix: str, tmp_path: Path) -> None:
    plain = net(1).state_dict()
    ckpt.save({"model": {prefix + name: value for name, value in plain.items()}}, tmp_path / "a")
    ckpt.save({"model": dict(plain)}, tmp_path / "b")
    for wrap in (KINDS["plain"], compiled, with_part(compiled)):
        model = wrap(net(2))
        assert not ckpt.load({"model": model}, tmp_path / "a").missing
        found = plain_names(model, model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain[found[name]])
    state = {"model": {prefix + name: torch.zeros_like(value) for name, value in plain.items()}}
    ckpt.load(state, tmp_path / "b")
    assert all(torch.equal(state["model"][prefix + name], value) for name, value in plain.items())


def test_a_part_called_module_is_not_taken_for_a_wrapper(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "module.a": torch.zeros(2)}
    ckpt.save({"model": saved}, tmp_path / "a")
    state = {"model": {"a": torch.full((2,), 5.0), "module.module.a": torch.full((2,), 6.0)}}
    with pytest.raises(LayoutMismatch, match=r"module\.module\.a"):
        ckpt.load(state, tmp_path / "a")
    ckpt.load(state, tmp_path / "a", strict=False)
    assert state["model"]["a"].tolist() == [1.0, 1.0]
    assert state["model"]["module.module.a"].tolist() == [6.0, 6.0], "it may be either"
    other = {"model": {"a": torch.full((2,), 5.0), "module.a": torch.full((2,), 6.0)}}
    ckpt.save({"model": {"module.a": torch.zeros(2)}}, tmp_path / "b")
    report = ckpt.load(other, tmp_path / "b", strict=False)
    assert report.missing == ("model/a",)
    assert other["model"]["a"].tolist() == [5.0, 5.0], "another tensor of the state has that name"


def test_compiled_modules_on_the_meta_device(tmp_path: Path) -> None:
    model = net(1)
    ckpt.save({"model": model}, tmp_path / "a")
    with torch.device("meta"):
        fresh = compiled(net(2))
    ckpt.load({"model": fresh}, tmp_path / "a", device="cpu")
    expected = model.state_dict()
    assert all(
        torch.equal(value, expected[name.removeprefix("_orig_mod.")])
        for name, value in fresh.state_dict().items()
    )


def test_versions_of_parts_reach_the_module(tmp_path: Path) -> None:
    """BatchNorm takes a state dict without a version for an old one, which counts no batches."""
    model = compiled(net(1))
    model._orig_mod(torch.ones(2, 3))
    ckpt.save({"model": model}, tmp_path / "a")
    fresh = compiled(net(2))
    ckpt.load({"model": fresh}, tmp_path / "a")
    assert fresh._orig_mod[2][1].num_batches_tracked == 1


def test_averages_are_saved_and_loaded_into_models(tmp_path: Path) -> None:
    averages = AveragedModel(compiled(net(1)))
    averages.update_parameters(compiled(net(1)))
    averages.update_parameters(compiled(net(3)))
    ckpt.save({"ema": averages}, tmp_path / "a")
    fresh = AveragedModel(net(2))
    ckpt.load({"ema": fresh}, tmp_path / "a")
    assert fresh.n_averaged == 2
    expected = averages.module.state_dict()
    for other in (fresh.module, net(4)):
        if other is not fresh.module:
            options: dict[str, Any] = {"rename": {"model": "ema"}, "select": "ema/module.*"}
            ckpt.load({"model": other}, tmp_path / "a", **options)
        for name, value in other.state_dict().items():
            assert torch.equal(value, expected[f"_orig_mod.{name}"])
