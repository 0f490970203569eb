"""Rules against numpy: what is loaded through them, and what goes back by their inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.mapping.changes import MappingRule
from dtckpt.dtensor import Mesh

Arrays = dict[str, np.ndarray[Any, Any]]

W = np.arange(48, dtype=np.float32).reshape(12, 4)
HEADS = W.reshape(2, 3, 2, 4)  # two groups of three parts of two rows

CASES: dict[str, tuple[list[MappingRule], Arrays, Arrays]] = {
    "a name": ([ckpt.Move("w", "model.w")], {"w": W}, {"model.w": W}),
    "a prefix": (
        [ckpt.Move("model.{rest*}", "{rest*}")],
        {"model.a.w": W, "model.b": W + 1},
        {"a.w": W, "b": W + 1},
    ),
    "names that change places": (
        [ckpt.Move("a", "c"), ckpt.Move("b", "a"), ckpt.Move("c", "b")],
        {"a": W, "b": W + 1},
        {"b": W, "a": W + 1},
    ),
    "a transposed weight": ([ckpt.Permute("w", "w", (1, 0))], {"w": W}, {"w": W.T}),
    "fused projections": (
        [ckpt.Split("{l}.qkv", ("{l}.q", "{l}.k", "{l}.v"), sizes=(8, 2, 2))],
        {"0.qkv": W, "1.qkv": W + 1},
        {
            f"{i}.{n}": W[s] + i
            for i in (0, 1)
            for n, s in zip("qkv", (slice(0, 8), slice(8, 10), slice(10, 12)), strict=True)
        },
    ),
    "fused projections by head": (
        [ckpt.Split("qkv", ("q", "k", "v"), groups=2)],
        {"qkv": W},
        {n: HEADS[:, i].reshape(4, 4) for i, n in enumerate("qkv")},
    ),
    "fused projections by group": (
        [ckpt.Split("qkv", ("q", "kv"), sizes=(4, 2), groups=2)],
        {"qkv": W},
        {"q": HEADS[:, :2].reshape(8, 4), "kv": HEADS[:, 2].reshape(4, 4)},
    ),
    "rows of gate and up by turns": (
        [ckpt.Split("gate_up", ("gate", "up"), groups=6)],
        {"gate_up": W},
        {"gate": W[::2], "up": W[1::2]},
    ),
    "columns": (
        [ckpt.Split("w", ("a", "b"), dim=-1, sizes=(1, 3))],
        {"w": W},
        {"a": W[:, :1], "b": W[:, 1:]},
    ),
    "two of one": (
        [ckpt.Merge(("a", "b"), "ab", 1)],
        {"a": W, "b": -W},
        {"ab": np.concatenate([W, -W], 1)},
    ),
    "experts": (
        [ckpt.Stack("experts.{e}.w", "experts.w")],
        {f"experts.{i}.w": W + i for i in range(11)},
        {"experts.w": np.stack([W + i for i in range(11)])},
    ),
    "experts with fused gates": (
        [
            ckpt.Stack("{l}.e.{e}.w1", "{l}.w1"),
            ckpt.Stack("{l}.e.{e}.w3", "{l}.w3"),
            ckpt.Merge(("{l}.w1", "{l}.w3"), "{l}.gate_up", dim=1),
            ckpt.Permute("{l}.gate_up", "{l}.gate_up", (0, 2, 1)),
        ],
        {f"0.e.{i}.{n}": W * s + i for i in range(3) for n, s in (("w1", 1), ("w3", -1))},
        {"0.gate_up": np.stack([np.concatenate([W + i, -W + i]).T for i in range(3)])},
    ),
    "experts one by one": (
        [ckpt.Unstack("w", "w.{e}", dim=1)],
        {"w": W},
        {f"w.{i}": W[:, i] for i in range(4)},
    ),
    "rotary pairs": (
        [ckpt.Permute("w", "w", (0, 2, 1, 3), view=(2, 2, -1, 4))],
        {"w": W},
        {"w": W.reshape(2, 2, 3, 4).transpose(0, 2, 1, 3).reshape(12, 4)},
    ),
    "another shape": (
        [ckpt.Reshape("w", "w", (3, -1), (12, 4))],
        {"w": W},
        {"w": W.reshape(3, 16)},
    ),
    "a padded vocabulary": (
        [ckpt.Pad("w", "w", 16, of=12)],
        {"w": W},
        {"w": np.concatenate([W, np.zeros((4, 4), np.float32)])},
    ),
}


def saved(arrays: Arrays, path: Path) -> Path:
    path.mkdir(exist_ok=True)
    tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_rule(case: str, tmp_path: Path) -> None:
    rules, stored, expected = CASES[case]
    source = saved(stored, tmp_path / "source")
    table = ckpt.MappingTable.from_bytes(ckpt.MappingTable(rules).to_bytes(), "here")
    state = {name: torch.full(value.shape, -1.0) for name, value in expected.items()}
    ckpt.load(state, source, mapping=table, no_dist=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name].numpy(), value)
    with ckpt.open(source, mapping=rules) as opened:
        assert set(opened) == set(expected)
        for name, value in expected.items():
            assert opened[name].shape == value.shape
            np.testing.assert_array_equal(opened[name][1:].numpy(), value[1:])
            np.testing.assert_array_equal(opened[name][..., -1].numpy(), value[..., -1])
    ckpt.reshard(
        source, tmp_path / "ours", Mesh.parse("tp=2"), ckpt.parse_rules("*=S(0)"), mapping=table
    )
    assert not ckpt.verify(tmp_path / "ours").problems
    ckpt.export(tmp_path / "ours", tmp_path / "back", mapping=table.inverse())
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(stored)
    for name, value in stored.items():
        np.testing.assert_array_equal(back[name].numpy(), value)
