"""Manifests, headers and tables of any content, with right digests: our errors or right values."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.saving import writers
from dtckpt.dtensor import Box, IrregularLayout, Layout, Mesh, Ragged, Replicate, Shard
from dtckpt.errors import DtckptError
from dtckpt.storage import LocalStore, MemoryStore
from dtckpt.tools.cli import main

from ..simulate import Given, items, save_all
from .forging import Objects, forged, objects_of

NUM_CASES = int(os.environ.get("DTCKPT_FUZZ", "150"))
"""Of each kind; ``DTCKPT_FUZZ=20000`` for a night."""
SEED = int(os.environ.get("DTCKPT_FUZZ_SEED", "2026"))
MAX_SECONDS = 5.0
MAX_BYTES = 256 << 20

MESH = Mesh((2, 2), ("dp", "tp"))
SHAPES = {"w": (9, 30), "e": (6, 4), "r": (7, 3), "c": (64, 2), "s": (), "n": (0, 3)}


def many_ranks() -> tuple[Objects, str]:
    """A checkpoint of four ranks: cells, slices, replicas, boxes, ragged and empty parts."""
    boxes = ((0, Box((0, 0), (4, 4))), (3, Box((4, 0), (2, 3))), (2, Box((4, 3), (2, 1))))
    layouts: dict[str, Layout | IrregularLayout] = {
        "w": Layout(MESH, (Shard(0), Shard(1)), SHAPES["w"]),
        "e": IrregularLayout(SHAPES["e"], boxes),
        "r": Layout(MESH, (Ragged(0, (6, 1)), Replicate()), SHAPES["r"]),
        "c": Layout.replicated(MESH, SHAPES["c"]),
        "s": Layout.replicated(MESH, ()),
        "n": Layout.replicated(MESH, SHAPES["n"]),
    }
    given = {
        name: Given(items(SHAPES[name], "F32", seed), "F32", layout)
        for seed, (name, layout) in enumerate(layouts.items())
    }
    with mock.patch.object(writers, "MIN_SLICE_BYTES", 64):
        store, _ = save_all(given, range(4), block_bytes=64)
    assert any("writers" in line for line in store.read("manifest.json").decode().splitlines())
    return {f"run/step-2/{name}": data for name, data in objects_of(store).items()}, "run/step-2/"


def one_rank() -> tuple[Objects, str]:
    """An incremental checkpoint of one rank: values of all kinds, tied tensors, a base."""
    objects: Objects = {}
    run = MemoryStore(objects).substore("run")
    state: dict[str, Any] = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    ckpt.save(state, run.substore("step-1"), no_dist=True)
    state["w"] = state["w"] + 1
    state |= {"tied": state["w"], "rng": ckpt.PerRank(torch.arange(5)), "step": 3, "none": None}
    state |= {"items": {1: (2, [b"x", 1j, float("nan")]), "a": np.float32(3)}, "t": torch.float16}
    ckpt.save(
        state, run.substore("step-2"), no_dist=True, base=run.substore("step-1"), metadata={"a": 1}
    )
    return objects, "run/step-2/"


def fresh() -> dict[str, torch.Tensor]:
    """Destinations of all tensors that the checkpoints share."""
    return {name: torch.full(shape, 7.0) for name, shape in SHAPES.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor; comparisons must not stumble over NaN."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(operation: Callable[[], object]) -> Exception | None:
    """What a call raises, whatever it is."""
    try:
        operation()
    except Exception as error:
        return error
    return None


class Trial:
    """Everything that can be done with a forged checkpoint."""

    def __init__(self, objects: Objects, at: str) -> None:
        self.objects = objects
        self.root = at.split("/")[0]
        self.store = MemoryStore(objects).substore(at.rstrip("/"))

    def operations(self) -> Iterator[Callable[[], object]]:
        """Yield calls that may fail, but only by an error of ours."""
        yield self.read_all
        yield lambda: ckpt.load(fresh(), self.store, no_dist=True)
        yield lambda: ckpt.load(fresh(), self.store, no_dist=True, strict=False)
        yield lambda: ckpt.load({"items": None, "step": 0}, self.store, no_dist=True, strict=False)
        yield lambda: ckpt.verify(self.store)
        yield lambda: ckpt.latest(MemoryStore(self.objects).substore(self.root), no_dist=True)
        rules = ckpt.parse_rules("w=S(0)")
        yield lambda: ckpt.reshard(self.store, MemoryStore(), Mesh((2,)), rules)
        yield lambda: ckpt.delete(self.copy())
        yield lambda: ckpt.save({"w": 1}, self.copy(), no_dist=True, overwrite=True)

    def copy(self) -> Any:
        """The same in a store of its own, to be changed."""
        return MemoryStore(dict(self.objects)).substore(self.store.url.split("/", 3)[3])

    def read_all(self) -> None:
        """Read every tensor lazily, and all values."""
        checkpoint = ckpt.open(self.store)
        checkpoint.state_dict()
        for tensor in checkpoint.values():
            if np.prod(tensor.shape, dtype=float) < 1e6:
                tensor[...]


@pytest.mark.parametrize("made", [many_ranks, one_rank])
def test_forged_metadata_ends_in_our_errors_soon_and_in_little_memory(
    made: Callable[[], tuple[Objects, str]],
) -> None:
    objects, at = made()
    expected = fresh()
    ckpt.load(expected, MemoryStore(objects).substore(at.rstrip("/")), strict=False, no_dist=True)
    known = {bits(tensor) for tensor in (*expected.values(), *fresh().values())}
    rng = random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for number in range(NUM_CASES):
        trial = Trial(forged(objects, rng, at), at)
        for operation in trial.operations():
            began = time.process_time()
            said = outcome(operation)
            assert said is None or (isinstance(said, DtckptError) and len(str(said)) < 20_000), (
                number,
                repr(said),
            )
            assert time.process_time() - began < MAX_SECONDS, number
        loaded = fresh()
        try:
            ckpt.load(loaded, trial.store, no_dist=True, strict=False)
        except DtckptError:
            continue
        wrong = [name for name, tensor in loaded.items() if bits(tensor) not in known]
        assert not wrong, number
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert after - before < MAX_BYTES


@pytest.mark.parametrize("made", [many_ranks, one_rank])
def test_the_command_takes_forged_metadata_for_no_bug(
    made: Callable[[], tuple[Objects, str]], tmp_path: Any
) -> None:
    objects, at = made()
    rng = random.Random(SEED)
    for number in range(NUM_CASES // 10):
        folder = LocalStore(tmp_path / str(number))
        for name, data in forged(objects, rng, at).items():
            folder.publish(name, data, overwrite=False)
        place = f"{folder.url}/{at.rstrip('/')}"
        target = f"{folder.url}/target"
        for args in (
            ["inspect", place],
            ["inspect", "--json", place],
            ["inspect", "--layout", place],
            ["inspect", folder.url + "/run"],
            ["verify", place],
            ["verify", "--json", place],
            ["reshard", place, target, "--mesh", "dp=2", "--placements", "*=R"],
        ):
            began = time.process_time()
            result = CliRunner().invoke(main, args)
            assert result.exit_code in (0, 1, 2, 3, 4), (number, args, result.output)
            assert time.process_time() - began < MAX_SECONDS, (number, args)
