"""Loaders that are run once on tensors without elements, against what they do with real ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.mapping.copies_rule import Copies
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Replicate
from dtckpt.errors import LayoutMismatch

Weights = dict[str, Tensor]

STORED: Weights = {
    "a": torch.arange(48.0).reshape(12, 4),
    "b": torch.arange(48.0).reshape(12, 4) + 100,
    "v": torch.arange(20.0).reshape(5, 4) + 200,
    "none": torch.empty(0, 4),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(STORED, tmp_path / "model.safetensors")
    return tmp_path


def zeros_then_rows(w: Weights) -> Tensor:
    made = torch.zeros(8, 4)
    made[:5] = w["v"]
    return made


def every_other_row(w: Weights) -> Tensor:
    made = w["a"].new_zeros(12, 4)
    made[::2] = w["b"][1::2]
    return made


def written_over(w: Weights) -> Tensor:
    made = w["b"].clone()
    made[[1, 2]] = w["v"][3:5]
    made[5, 1:3] = w["v"][0, 0:2]
    made.narrow(0, 8, 4).copy_(w["a"][0])  # the same row four times
    return made


def head_by_head(w: Weights) -> Tensor:
    made = torch.empty(2, 6, 4)
    for head in range(6):
        made[0, head].copy_(w["a"][2 * head])
        made[1, head].copy_(w["a"][2 * head + 1])
    return made.flatten(0, 1)


MOVES: dict[str, Callable[[Weights], Tensor]] = {
    "queries of groups": lambda w: w["a"].view(2, 3, 2, 4)[:, 0].reshape(4, 4),
    "parts put together": lambda w: torch.cat([*w["a"].split(4)[1:], w["v"], w["none"]]),
    "nothing": lambda w: w["none"],
    "a stack of transposed ones": lambda w: torch.stack([w["a"].t().contiguous(), w["b"].mT], 1),
    "padding of ones own": zeros_then_rows,
    "padding of torch": lambda w: nn.functional.pad(w["v"], (0, 1, 1, 2)),
    "rows of a list": lambda w: w["b"][[3, 4, 1, 7]],
    "rows of a tensor": lambda w: w["b"].index_select(0, torch.tensor([0, 11])),
    "rows of a mask": lambda w: w["v"][torch.tensor([True, False, True, True, False])],
    "backwards": lambda w: w["v"].flip((0, 1)),
    "heads once for each query": lambda w: w["v"].repeat_interleave(2, 0),
    "again and again": lambda w: w["v"].repeat(2, 3),
    "every other row": every_other_row,
    "what was written over": written_over,
    "head by head": head_by_head,
    "by einsum": lambda w: torch.einsum("ij->ji", w["v"]),
    "by memory of ones own": lambda w: torch.ones(12, 4).copy_(torch.zeros(12, 4).copy_(w["a"])),
    "on another device": lambda w: w["b"].narrow(0, 2, 10).to("cpu").clone(),
    "one number": lambda w: w["v"][2, 3],
    "all of it": lambda w: w["a"],
}


def test_what_only_moves_elements(source: Path) -> None:
    def loader(weights: Weights) -> Weights:
        return {name: move(weights) for name, move in MOVES.items()}

    table = ckpt.trace_mapping(loader, source)
    expected = loader({name: tensor.clone() for name, tensor in STORED.items()})
    state = {name: torch.full(value.shape, -1.0) for name, value in expected.items()}
    told = ckpt.MappingTable.from_bytes(table.to_bytes(), "here")
    report = ckpt.load(state, source, mapping=told, no_dist=True)
    assert set(report.loaded) == set(MOVES)
    for name, value in expected.items():
        assert state[name].equal(value), name
    (rule,) = table.rules
    assert isinstance(rule, Copies)
    counts = {name: len(made.copies) for name, made in rule.targets.items()}
    assert max(counts.values()) <= 20  # backwards: an element by itself
    assert counts["head by head"] == 2


def computes(w: Weights) -> Tensor:
    return w["a"] * 2


def converts(w: Weights) -> Tensor:
    return w["a"].to(torch.bfloat16)


def takes_bits(w: Weights) -> Tensor:
    return w["a"].view(torch.int32)


def asks(w: Weights) -> Tensor:
    return w["a"] if bool(w["v"].sum() > 0) else w["b"]


def leaves_torch(w: Weights) -> Any:
    return w["a"].numpy()


def adds_its_own(w: Weights) -> Tensor:
    return torch.cat([w["a"], torch.ones(1, 4)])


def fills_with_ones(w: Weights) -> Tensor:
    return w["a"].clone().fill_(1)


def computes_into_another(w: Weights) -> Tensor:
    made = torch.zeros(12, 4).copy_(w["a"])
    return torch.add(torch.ones(12, 4), torch.ones(12, 4), out=made)


def mixes_with_its_own(w: Weights) -> Tensor:
    return torch.ones(12, 4).lerp_(torch.zeros(12, 4).copy_(w["a"]), 1.0)


def hands_out(w: Weights) -> Any:
    made = torch.zeros(12, 4).copy_(w["a"])
    return torch.from_numpy(made.numpy().copy())


def reads_a_list(w: Weights) -> Any:
    made = torch.zeros(12, 4).copy_(w["a"])
    return made.tolist()


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (computes, "mul computes with elements"),
        (converts, "it converts torch.float32 to torch.bfloat16"),
        (takes_bits, "elements are seen as other ones"),
        (asks, "sum computes with elements"),
        (leaves_torch, r"numpy\(\) asks for elements"),
        (hands_out, r"numpy\(\) asks for elements"),
        (reads_a_list, r"tolist\(\) asks for elements"),
        (computes_into_another, "add computes with elements"),
        (mixes_with_its_own, "lerp_ computes with elements"),
        (adds_its_own, "it has values that are not those of the checkpoint"),
        (fills_with_ones, "no values but those of the checkpoint, and zeros"),
    ],
)
def test_what_does_more_is_named_with_its_line(
    source: Path, loader: Callable[[Weights], Any], told: str
) -> None:
    line = max(number for *_, number in loader.__code__.co_lines() if number)
    where = re.escape(f"{__file__}:{line} ({loader.__name__}): ")
    with pytest.raises(LayoutMismatch, match=f"{where}.*{told}"):
        ckpt.trace_mapping(lambda weights: {"x": loader(weights)}, source)


def test_what_is_filled_in_part_is_named(source: Path) -> None:
    def loader(weights: Weights) -> Weights:
        made = torch.full((8, 4), 3.0)
        made[:5] = weights["v"]
        return {"x": made}

    with pytest.raises(LayoutMismatch, match=r"'x': expected 32 elements, got 20; 12 come from no"):
        ckpt.trace_mapping(loader, source)
    with pytest.raises(LayoutMismatch, match="has filled nothing"):
        ckpt.trace_mapping(lambda _: {}, source)
    with pytest.raises(LayoutMismatch, match="a module or tensors by name, got list"):
        ckpt.trace_mapping(lambda _: [], source)
    with pytest.raises(LayoutMismatch, match="'y', in which is nothing of the checkpoint"):
        ckpt.trace_mapping(lambda w: {"x": w["a"], "y": torch.zeros(3)}, source)
    with pytest.raises(LayoutMismatch, match="returns dict as 'y'; expected tensors by name"):
        ckpt.trace_mapping(lambda w: {"x": w["a"], "y": dict(w)}, source)


def test_memory_that_is_seen_as_another_type_is_refused(source: Path) -> None:
    kept = torch.zeros(12, 2, dtype=torch.float64)

    def loader(w: Weights) -> Weights:
        kept.view(torch.float32).copy_(w["a"])
        return {"x": kept}

    with pytest.raises(LayoutMismatch, match="'x': elements are seen as other ones"):
        ckpt.trace_mapping(loader, source)
    with pytest.raises(LayoutMismatch, match="elements are seen as other ones"):
        ckpt.trace_mapping(loader, source, {"x": kept})


def test_parameters_whose_data_is_replaced(source: Path) -> None:
    model = Model("cpu")

    def loader(weights: Weights) -> None:
        model.up.weight.data = weights["b"].flip(0)[:, 1:]

    table = ckpt.trace_mapping(loader, source, {"w": model.up.weight})
    with ckpt.open(source, mapping=table) as opened:
        assert opened["w"][...].equal(STORED["b"].flip(0)[:, 1:])


def test_targets_that_cannot_be_traced(source: Path) -> None:
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    spread = DTensor.from_local(torch.zeros(12, 4), mesh, (Replicate(),), shape=(12, 4))
    for target, told in [
        ({"a": spread}, "'a' is a DTensor: trace into the whole module"),
        ({"model": Model("meta")}, "target= has no tensors"),
    ]:
        with pytest.raises(LayoutMismatch, match=told):
            ckpt.trace_mapping(lambda _: None, source, target)  # type: ignore[arg-type]


class Model(nn.Module):
    """A padded vocabulary, tied to the output."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(4, 12, bias=False, device=device)
        self.embed = nn.Embedding(8, 4, device=device)
        self.head = nn.Linear(4, 8, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.untouched = nn.Linear(2, 2, bias=False, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [False, True])
def test_modules_are_targets_and_stay_as_they_are(source: Path, device: str, assign: bool) -> None:
    model = Model(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loader(weights: Weights) -> None:
        model.up.load_state_dict({"weight": weights["a"]}, assign=assign)
        with torch.no_grad():
            model.embed.weight[:5].copy_(weights["v"])
            model.embed.weight.data[5:].zero_()

    table = ckpt.trace_mapping(loader, source, model)
    if device == "cpu":
        assert model.embed.weight.equal(before["embed.weight"])
    fresh = Model("cpu")
    kept = fresh.untouched.weight.clone()
    report = ckpt.load(fresh, source, mapping=table, strict=False, no_dist=True)
    assert report.missing == ("untouched.weight",)
    assert fresh.up.weight.equal(STORED["a"])
    assert fresh.head.weight.equal(torch.cat([STORED["v"], torch.zeros(3, 4)]))
    assert fresh.untouched.weight.equal(kept)


def test_a_traced_table_has_an_inverse_where_nothing_is_lost(tmp_path: Path) -> None:
    stored = {name: value for name, value in STORED.items() if value.numel()}
    source = tmp_path / "model.safetensors"
    save_file(stored, source)

    def loader(weights: Weights) -> Weights:
        fused = torch.cat([weights["a"].view(3, 4, 4), weights["b"].view(3, 4, 4)], 1)
        padded = nn.functional.pad(weights["v"], (0, 0, 0, 3))
        return {"fused": fused.transpose(1, 2).flatten(0, 1), "v": padded}

    table = ckpt.trace_mapping(loader, source)
    expected = loader(stored)
    state = {"model": {name: torch.empty_like(value) for name, value in expected.items()}}
    ckpt.load(state, source, mapping=table, rename={"model": ""}, no_dist=True)
    ckpt.save(state, tmp_path / "ours", no_dist=True)
    ckpt.export(tmp_path / "ours", tmp_path / "out", part="model", mapping=table.inverse())
    with ckpt.open(tmp_path / "out") as opened:
        assert set(opened) == set(stored)
        assert all(opened[name][...].equal(value) for name, value in stored.items())
    lossy = ckpt.trace_mapping(lambda weights: {"a": weights["a"][1:]}, source)
    with pytest.raises(LayoutMismatch, match="cannot be undone: tensor 'a': expected 48 elements"):
        lossy.inverse()
    doubled = ckpt.trace_mapping(lambda w: {"a": w["a"], "again": w["a"], **w}, source)
    with pytest.raises(LayoutMismatch, match="'a': expected 48 elements, got 96; some come"):
        doubled.inverse()
