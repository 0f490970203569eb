"""Sequences of which ranks hold a piece of either end: computed with, saved and drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import (
    DeviceMesh,
    HeadTail,
    Layout,
    Mesh,
    Replicate,
    Shard,
    distribute_tensor,
    random,
)
from dtckpt.dtensor.debug import CommDebugMode, visualize_sharding
from tests.dtensor.rank_meshes import (
    assert_holds,
    run_on_mesh,
    scattered,
)

WHOLE = torch.arange(63.0).view(9, 7)

X = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IDS = torch.arange(18).view(2, 9) % 5
TABLE = torch.arange(30.0).view(5, 6)

KEEPING: dict[str, Callable[[Any, Any], Any]] = {
    "pointwise": lambda x, _: F.gelu(x) + x * 2,
    "two": lambda x, y: torch.where(x > y, x, y),
    "written": lambda x, y: x.clone().add_(y),
    "norm": lambda x, _: F.layer_norm(x, (6,)),
    "softmax": lambda x, _: x.softmax(-1),
    "heads": lambda x, _: x.view(2, 9, 2, 3).transpose(1, 2),
    "parts": lambda x, _: x.chunk(3, -1)[1],
    "picked": lambda x, _: x.gather(-1, x.argmax(-1, keepdim=True)),
    "sorted": lambda x, _: x.sort(-1)[0],
    "placed": lambda x, y: x.scatter_add(-1, y.argmax(-1, keepdim=True), x[..., :1]),
}
MOVED: dict[str, Callable[[Any, Any], Any]] = {
    "softmax along it": lambda x, _: x.softmax(1),
    "flat": lambda x, _: x.reshape(18, 6),
    "cumsum": lambda x, _: x.cumsum(1),
    "cumsum in place": lambda x, _: x.clone().cumsum_(1),
    "flip": lambda x, _: x.flip(1),
    "slice": lambda x, _: x[:, 2:7],
    "select": lambda x, _: x[:, 4],
    "argmax": lambda x, _: x.argmax(1),
    "sort": lambda x, _: x.sort(1)[0],
    "roll": lambda x, _: x.roll(2, 1),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "tril": lambda x, _: x.tril(),
    "pad": lambda x, _: F.pad(x, (0, 0, 1, 2)),
    "index": lambda x, _: x[:, [1, 5, 8]],
    "unfold": lambda x, _: x.unfold(1, 3, 1),
    "diff": lambda x, _: x.diff(dim=1),
    "repeat": lambda x, _: x.repeat_interleave(2, 1),
    "sum": lambda x, _: x.sum(1),
    "std": lambda x, _: x.std(1),
    "mean": lambda x, _: x.mean(),
    "loss": lambda x, _: F.cross_entropy(x.transpose(1, 2), x.argmax(-1)),
    "attention": lambda x, y: F.scaled_dot_product_attention(
        x[:, None], y[:, None], y[:, None], is_causal=True
    ),
}


def test_operators_that_do_not_ask_for_places_move_nothing() -> None:
    """Nor do their gradients more than those of neighbouring positions."""

    def body(mesh: DeviceMesh) -> None:
        for name, operate in KEEPING.items():
            whole = X.clone().requires_grad_()
            wanted = operate(whole, X.flip(1))
            wanted.sin().sum().backward()
            sent: list[int] = []
            for placement in (Shard(1), HeadTail(1)):
                x, y = (scattered(t, mesh, [placement]) for t in (X, X.flip(1)))
                x.requires_grad_()
                with CommDebugMode() as counted:
                    made = operate(x, y)
                assert counted.get_total_counts() == 0, name
                assert type(made.placements[0]) is type(placement)
                assert_holds(made, wanted.detach(), rtol=1e-12, atol=1e-12)
                with CommDebugMode() as counted:
                    made.sin().sum().backward()
                sent.append(counted.get_total_counts())
                grad: Any = x.grad
                assert grad.placements == (placement,)
                torch.testing.assert_close(grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)
            assert sent[0] == sent[1], name
        rows: Any = F.embedding(
            scattered(IDS, mesh, [HeadTail(1)]), scattered(TABLE, mesh, [Replicate()])
        )
        assert rows.placements == (HeadTail(1),)
        assert_holds(rows, F.embedding(IDS, TABLE))

    run_on_mesh((3,), body)


def test_all_others_give_what_one_device_gives() -> None:
    def body(mesh: DeviceMesh) -> None:
        for operate in MOVED.values():
            x, y = (scattered(t, mesh, [HeadTail(1)]) for t in (X, X.flip(1)))
            found = operate(x, y).full_tensor()
            torch.testing.assert_close(found, operate(X, X.flip(1)))

    run_on_mesh((2,), body)


def test_dropout_keeps_what_it_keeps_on_every_mesh() -> None:
    def body(mesh: DeviceMesh) -> None:
        found: list[torch.Tensor] = []
        for placement in (HeadTail(1), Shard(1), Replicate()):
            random.manual_seed(7, mesh)
            dropped: Any = F.dropout(scattered(X, mesh, [placement]), 0.5)
            found.append(dropped.full_tensor())
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    run_on_mesh((2,), body)


def test_writes_to_parts_reach_the_tensor() -> None:
    wanted = X.clone()
    wanted[:, 2:6] = 0.0

    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(X, mesh, [HeadTail(1)])
        x[:, 2:6] = 0.0
        assert_holds(x, wanted)

    run_on_mesh((2,), body)


def test_checkpoints_of_it_are_read_by_any_layout(tmp_path: Path) -> None:
    """Activations or a cache of keys: saved, loaded onto others, and onto it."""
    path = tmp_path / "cache"

    def body(mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        tensor = scattered(WHOLE, mesh, [HeadTail(0)])
        dcp.save({"cache": tensor}, path, process_group=group)
        for placement in (HeadTail(0), HeadTail(1), Shard(0), Replicate()):
            into = {"cache": scattered(torch.zeros(9, 7), mesh, [placement])}
            dcp.load(into, path, process_group=group)
            assert_holds(into["cache"], WHOLE)
        other = path.with_name("plain")
        dcp.save({"cache": scattered(WHOLE, mesh, [Shard(1)])}, other, process_group=group)
        into = {"cache": scattered(torch.zeros(9, 7), mesh, [HeadTail(0)])}
        dcp.load(into, other, process_group=group)
        assert_holds(into["cache"], WHOLE)

    run_on_mesh((3,), body)
    alone = {"cache": torch.zeros(9, 7)}
    dcp.load(alone, path)
    assert torch.equal(alone["cache"], WHOLE)


def test_it_is_drawn_by_its_ranges() -> None:
    text = visualize_sharding(Layout(Mesh((2,)), (HeadTail(0),), (8, 4)))
    assert "HeadTail(0): cuts dim 0 into 4, 4" in text
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in row] for row in rows[1:]] == [
        ["0:2", "0"],
        ["2:6", "1"],
        ["6:8", "0"],
    ]
