"""``op_coverage`` and the sizes of caches."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from dtckpt.dtensor import DeviceMesh, Shard, strict
from dtckpt.dtensor.debug import cache_sizes, clear_caches, op_coverage
from dtckpt.dtensor.ops.engine.table import DECOMPOSITIONS, METAS, RULES
from dtckpt.errors import UnsupportedOp

from ..rank_meshes import run_on_mesh, scattered


def test_every_operator_has_a_way() -> None:
    ways = op_coverage()
    counts = Counter(ways.values())
    assert len(ways) > 3000
    assert set(counts) == {"rule", "decomposition", "parts", "whole"}
    assert counts["rule"] > 1000
    assert ways["aten.mm.default"] == ways["aten.add_.Tensor"] == "rule"
    assert ways["aten._softmax.default"] == ways["aten._softmax.out"] == "decomposition"
    assert ways["aten.linear.default"] in ("rule", "parts")


@pytest.mark.filterwarnings("ignore:.*fake_quantize")
def test_ways_are_those_that_calls_take() -> None:
    ways = op_coverage()
    assert ways["aten.__and__.Scalar"] == "parts"
    assert ways["aten.fake_quantize_per_tensor_affine_cachemask.default"] == "whole"

    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.rand(4, 4), mesh, [Shard(0)])
        aten = torch.ops.aten
        quantize = aten.fake_quantize_per_tensor_affine_cachemask.default
        with strict():
            aten.mm.default(tensor, tensor)
            aten._softmax.default(tensor, 0, False)
            aten.__and__.Scalar(tensor.int(), 1)
            with pytest.raises(UnsupportedOp, match="fake_quantize"):
                quantize(tensor, 0.1, 0, 0, 255)
        rounded: Any = quantize(tensor, 0.1, 0, 0, 255)[0]
        torch.testing.assert_close(
            rounded.full_tensor(), quantize(tensor.full_tensor(), 0.1, 0, 0, 255)[0]
        )

    run_on_mesh((2,), body)


def test_sizes_of_caches() -> None:
    def body(mesh: DeviceMesh) -> None:
        assert cache_sizes(mesh) == {}
        tensor = scattered(torch.rand(4, 4), mesh, [Shard(0)])
        (tensor @ tensor).sum()
        clear_caches(mesh)
        (tensor @ tensor).sum()
        found = cache_sizes(mesh)
        assert found["plans"] == 2
        assert found["redistribute_plans"] >= 1
        clear_caches(mesh)
        assert cache_sizes(mesh) == {}
        (tensor @ tensor).sum()
        assert cache_sizes(mesh) == found

    run_on_mesh((2,), body)


def test_one_file_has_all_of_an_operator() -> None:
    family = re.compile(r"dtckpt\.dtensor\.ops\.(?!pointwise)\w+$")  # which is one for many
    tables = (RULES, DECOMPOSITIONS, METAS)
    for op in {op for table in tables for op in table}:
        made = [table[op] for table in tables if op in table]
        modules = [getattr(function, "func", function).__module__ for function in made]
        assert len({name for name in modules if family.match(name)}) <= 1, f"{op}: {modules}"
