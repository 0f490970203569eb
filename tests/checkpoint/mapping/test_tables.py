"""Tables that do not fit, that are damaged, or that somebody made up: each error names what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.copies import meeting
from dtckpt.checkpoint.copies.copies import MOST_COPIES
from dtckpt.checkpoint.mapping.changes import MappingRule
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch
from dtckpt.storage import MemoryStore
from dtckpt.tools.cli import main

STATE = {
    "model": {"qkv.weight": np.arange(24.0).reshape(12, 2), "layers": [np.ones(2), np.zeros(3)]},
    "half": torch.ones(12, 2, dtype=torch.float16),
    "step": 3,
}


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    ckpt.save(STATE, made, no_dist=True)
    return made


REFUSED: list[tuple[list[MappingRule], str]] = [
    ([ckpt.Move("model/qkv.weights", "x")], "no tensor fits; did you mean 'model/qkv.weight'"),
    ([ckpt.Move("step", "x")], "no tensor fits"),
    (
        [ckpt.Split("model/qkv.weight", ("a", "b"), sizes=(4, 4))],
        r"expected dim 0 of 1 x \[4, 4\] = 8, got 12",
    ),
    ([ckpt.Split("model/qkv.weight", ("a", "b"), groups=5)], "12 is not that of 10 equal parts"),
    ([ckpt.Split("model/qkv.weight", ("a", "b"), dim=2)], r"shape \(12, 2\) has no dim 2"),
    (
        [ckpt.Merge(("half", "model/qkv.weight"), "x")],
        "'model/qkv.weight' is float64 and 'half' is",
    ),
    (
        [ckpt.Merge(("model/layers/0", "model/layers/1"), "x")],
        r"'model/layers/1': expected shape \(2,\), got \(3,\); parts of different sizes need",
    ),
    ([ckpt.Merge(("half", "other"), "x")], "there is 'half', but no 'other' to go with it"),
    ([ckpt.Move("half", "model/qkv.weight")], "would be made, but is there already"),
    (
        [ckpt.Move("half", "x"), ckpt.Move("model/qkv.weight", "x")],
        "rule 1 of the mapping, Move.*'x' would be made, but was made by Move",
    ),
    ([ckpt.Move("half", "step")], "'step' cannot be made: a value stands at 'step'"),
    ([ckpt.Move("half", "model")], "'model' cannot be made: a container stands there"),
    ([ckpt.Move("half", "step/x")], "'step/x' cannot be made: a value stands at 'step'"),
    ([ckpt.Move("half", "a//b")], "'a//b' is no name of a tensor"),
    ([ckpt.Move("half", "#x")], "'#x' is no name of a tensor"),
    ([ckpt.Permute("half", "half", (0, 2, 1))], r"expected 3 dims, got shape \(12, 2\)"),
    ([ckpt.Permute("half", "half", (1, 0), view=(5, -1))], "cannot be seen as"),
    ([ckpt.Reshape("half", "half", (-1,), (6, 4))], r"expected shape \(6, 4\), got \(12, 2\)"),
    ([ckpt.Stack("model/layers/{i}", "x")], r"'model/layers/1': expected shape \(2,\), got \(3,\)"),
    ([ckpt.Stack("{i}", "x")], "expected a number, got 'half'"),
    ([ckpt.Pad("half", "half", 8)], "expected a size of at most 8 in dim 0, got 12"),
    ([ckpt.Pad("half", "half", 16, of=10)], "expected a size of 10 in dim 0, got 12"),
    ([ckpt.Crop("half", "half", 20)], "expected 20 or more in dim 0, got 12"),
    ([ckpt.Copies({"other": (2,)}, {})], "there is no tensor 'other'"),
    ([ckpt.Copies({"half": (2,)}, {})], r"'half': expected shape \(2,\), got \(12, 2\)"),
]


@pytest.mark.parametrize(("rules", "told"), REFUSED)
def test_rules_that_do_not_fit(rules: list[MappingRule], told: str, store: MemoryStore) -> None:
    with pytest.raises(LayoutMismatch, match=f"in-process://.*{told}"):
        ckpt.open(store, mapping=rules)


def test_rules_that_are_none() -> None:
    for make, told in [
        (lambda: ckpt.Move("a.{b}", "c"), r"'c' captures \[\], and 'a.{b}' \['b'\]"),
        (lambda: ckpt.Split("a", ("b", "b")), "a name stands twice"),
        (lambda: ckpt.Split("a", ("b", "c"), sizes=(1, 2, 3)), "not those of 2 parts"),
        (lambda: ckpt.Split("a", ()), "needs names"),
        (lambda: ckpt.Merge(("a", "b"), "c", groups=0), "groups=0"),
        (lambda: ckpt.Permute("a", "b", (0, 0)), "expected each of 0 to 1"),
        (lambda: ckpt.Stack("a.{b}.{c}", "d"), "one thing, a number, beyond"),
        (lambda: ckpt.Move("", "a"), "is no pattern"),
    ]:
        with pytest.raises(LayoutMismatch, match=told):
            make()
    for rule, told in [
        (ckpt.Drop("a"), "left out cannot be brought back"),
        (ckpt.Crop("a", "a", 3), "cut off cannot be brought back"),
        (ckpt.Pad("a", "a", 3), "needs of=, the size without padding"),
    ]:
        with pytest.raises(LayoutMismatch, match=told):
            ckpt.MappingTable([rule]).inverse()


def made(*copies: list[Any], sources: int = 4) -> bytes:
    """A table that makes one tensor of four elements of another one."""
    target = {"shape": [4], "copies": copies}
    rule = {"rule": "copies", "sources": {"a": [sources]}, "targets": {"b": target}}
    return json.dumps({"mapping": 1, "rules": [rule]}).encode()


def of_shape(shape: list[int]) -> bytes:
    rule = {"rule": "copies", "sources": {"a": shape}, "targets": {}}
    return json.dumps({"mapping": 1, "rules": [rule]}).encode()


HOSTILE: list[tuple[bytes, str]] = [
    (b"{", "malformed JSON"),
    (b"[]", "expected an object"),
    (b'{"mapping": 2, "rules": []}', "version 2; this dtckpt reads 1"),
    (b'{"mapping": 1, "rules": [{"rule": "run"}]}', "there is no rule 'run'"),
    (b'{"mapping": 1, "rules": [{"rule": "move", "source": "a"}]}', "move needs target"),
    (b'{"mapping": 1, "rules": [{"rule": "drop", "source": "a", "b": 1}]}', "drop takes no 'b'"),
    (b'{"mapping": 1, "rules": [{"rule": "drop", "source": 1}]}', "expected a string"),
    (
        b'{"mapping": 1, "rules": [{"rule": "crop", "source": "a", "target": "b", "size": "0"}]}',
        "size of crop is '0', expected an int",
    ),
    (made(["a", 0, 2, [[4, 1, 1]]]), "needs elements 2 to 6 of 'a', which has 4"),
    (made(["a", -1, 0, [[4, 1, 1]]]), "a start is -1"),
    (made(["a", 0, 0, [[4, -1, 1]]]), "a loop is -1"),
    (made(["a", 0, 0, [[3, 1, 1]]]), "expected 4 elements, got 3; 1 come from nowhere"),
    (made(["a", 0, 0, [[4, 0, 1]]]), "overlap"),
    (made(["a", 0, 0, [[4, 2, 1]]], sources=9), "expected elements 0 to 4, got 0 to 7"),
    (made(["a", 0, 0, [[2, 1, 1]]], ["a", 1, 0, [[2, 1, 1]]]), "bring the same elements"),
    (made(["a", 0, 0, [[4, 1, 1]]], ["a", 1, 0, []]), "got 5; some come twice"),
    (made(["c", 0, 0, [[4, 1, 1]]]), "made of 'c', which is no source"),
    (made(["a", 0]), "malformed mapping"),
    (made(*[["a", 0, 0, []]] * 70_000), f"at most {MOST_COPIES}"),
    (of_shape([1 << 63]), "expected an int"),
    (of_shape([1] * 65), "65 dims"),
]


@pytest.mark.parametrize(("text", "told"), HOSTILE)
def test_tables_that_somebody_made_up(text: bytes, told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as error:
        ckpt.MappingTable.from_bytes(text, "some/table.json")
    if isinstance(error.value, Corrupt):
        assert "some/table.json" in str(error.value)


def test_steps_that_do_not_divide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(37 * 41).reshape(37, 41)
    store = MemoryStore()
    ckpt.save({"w": rows}, store, no_dist=True)
    rules: list[MappingRule] = [
        ckpt.Permute("w", "w", (1, 0)),
        ckpt.Permute("w", "w", (1, 0), view=(37, 41)),
    ]
    expected = rows.T.reshape(37, 41).T.reshape(41, 37)
    assert np.array_equal(ckpt.open(store, mapping=rules)["w"][...].numpy(), expected)
    monkeypatch.setattr(meeting, "MOST_COPIES", 50)
    with pytest.raises(LayoutMismatch, match="tensor 'w' would be copied in more than"):
        ckpt.open(store, mapping=rules)


def test_structure_around_what_a_mapping_makes(store: MemoryStore) -> None:
    rules: list[MappingRule] = [
        ckpt.Move("model/layers/{i}", "blocks/{i}/w"),
        ckpt.Split("model/qkv.weight", ("model/q", "model/kv"), sizes=(8, 4)),
        ckpt.Move("half", "#7"),
    ]
    state = ckpt.open(store, mapping=rules).state_dict()
    assert set(state) == {"model", "step", "blocks", 7}
    assert set(state["model"]) == {"q", "kv"}
    assert state["step"] == 3
    assert state["blocks"]["1"]["w"][...].tolist() == [0, 0, 0]
    wanted = {"blocks": {"1": {"w": np.ones(3)}}, "step": 0}
    report = ckpt.load(wanted, store, mapping=rules, strict=False, no_dist=True)
    assert set(report.loaded) == {"blocks/1/w", "step"}
    assert wanted["step"] == 3
    assert set(report.unexpected) == {"model/q", "model/kv", "blocks/0/w", "#7"}


def test_the_commands_take_tables(tmp_path: Path) -> None:
    save_file({"qkv": torch.arange(12.0).reshape(6, 2)}, tmp_path / "model.safetensors")
    table = ckpt.MappingTable([ckpt.Split("qkv", ("q", "k", "v"), groups=2)])
    (tmp_path / "table.json").write_bytes(table.to_bytes())
    (tmp_path / "back.json").write_bytes(table.inverse().to_bytes())
    given = ["--mapping", str(tmp_path / "table.json")]
    source, ours = str(tmp_path / "model.safetensors"), str(tmp_path / "ours")
    shown = CliRunner().invoke(main, ["inspect", source, "--json", *given])
    assert list(json.loads(shown.stdout)["tensors"]) == ["q", "k", "v"]
    placed = ["--mesh", "tp=2", "--placements", "*=S(0)"]
    assert CliRunner().invoke(main, ["reshard", source, ours, *placed, *given]).exit_code == 0
    assert set(ckpt.open(ours)) == {"q", "k", "v"}
    target = str(tmp_path / "out.safetensors")
    done = CliRunner().invoke(
        main,
        ["convert", ours, target, "--to", "safetensors", "--mapping", str(tmp_path / "back.json")],
    )
    assert done.exit_code == 0, done.output
    assert load_file(target)["qkv"].tolist() == np.arange(12.0).reshape(6, 2).tolist()
    (tmp_path / "table.json").write_text("{}")
    refused = CliRunner().invoke(main, ["inspect", source, *given])
    assert refused.exit_code != 0
    assert "malformed mapping" in refused.output + refused.stderr
