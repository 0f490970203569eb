"""Loaders as they are written elsewhere: what ranks read for the tables that are traced of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.reading import limits
from dtckpt.dtensor import DeviceMesh, DTensor, Layout, Mesh, Packed, Placement, Replicate, Shard
from tests.frameworks.tiny_models import transformers

from ...ranks import run_ranks

Weights = dict[str, Tensor]
TP = 4
MOST = 1.02
"""Bytes read for one that is needed."""


def numbered(*shape: int) -> Tensor:
    return torch.randperm(torch.Size(shape).numel(), dtype=torch.int32).float().reshape(shape)


def local_of(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """What a rank holds, its boxes one after the other as ``Packed`` has them."""
    (placement,) = layout.placements
    parts = [whole[box.slices] for box in layout.held_by(rank)]
    return torch.cat(parts, placement.dim if isinstance(placement, Packed) else 0).contiguous()


def check_ratio(
    source: Path,
    table: ckpt.MappingTable,
    expected: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    *,
    read_once: bool | None = None,
    most: float = MOST,
) -> list[ckpt.LoadReport]:
    """Load on all ranks, compare every element, and count what is read."""
    mesh = Mesh((TP,))
    layouts = {
        name: Layout(mesh, (placements.get(name, Replicate()),), tuple(value.shape))
        for name, value in expected.items()
    }

    def load(rank: int, group: Any) -> ckpt.LoadReport:
        on_mesh = DeviceMesh("cpu", mesh, rank=rank)
        locals_ = {
            name: torch.full_like(local_of(expected[name], layout, rank), -1)
            for name, layout in layouts.items()
        }
        state = {
            name: DTensor.from_local(
                local, on_mesh, layouts[name].placements, shape=layouts[name].shape
            )
            for name, local in locals_.items()
        }
        report = ckpt.load(state, source, mapping=table, process_group=group, read_once=read_once)
        for name, local in locals_.items():
            assert local.equal(local_of(expected[name], layouts[name], rank)), name
        return report

    reports = run_ranks(TP, load)
    read = sum(report.bytes_read for report in reports)
    needed = sum(report.bytes_needed for report in reports)
    assert read <= most * needed, f"{read} bytes read, {needed} needed"
    return reports


@pytest.fixture
def small_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much less than usual as the weights are smaller: what is read over between them."""
    for name in ("PAGE_BYTES", "GAP_BYTES", "STEP_BYTES"):
        monkeypatch.setattr(limits, name, 64)


@pytest.mark.usefixtures("small_gaps")
@pytest.mark.parametrize("read_once", [None, True])
def test_transformers_own(tmp_path: Path, read_once: bool | None) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    stored = set(ckpt.open(tmp_path))
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in stored

    def loader(weights: Weights) -> Weights:
        kind = type(model)
        made = kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
        return made.state_dict()

    table = ckpt.trace_mapping(loader, tmp_path)
    expected: Weights = model.state_dict()
    assert not stored.issuperset(expected)
    placements: dict[str, Placement] = {}
    for name in expected:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            placements[name] = Shard(0)
        elif name.endswith("gate_up_proj"):
            placements[name] = Packed(1, (32, 32))
        elif name.endswith(("down_proj", "o_proj.weight")):
            placements[name] = Shard(expected[name].dim() - 1)
    check_ratio(tmp_path, table, expected, placements, read_once=read_once)


HEADS, GROUPS, HEAD, WIDTH = 16, 8, 8, 32


def megatron(weights: Weights) -> Weights:
    """Query heads lie with the keys and values that they share."""
    fused = weights["linear_qkv.weight"]
    per_group = HEADS // GROUPS
    grouped = fused.view(GROUPS, (per_group + 2) * HEAD, WIDTH)
    query, key, value = torch.split(grouped, [per_group * HEAD, HEAD, HEAD], dim=1)
    return {
        "q_proj.weight": query.reshape(-1, WIDTH),
        "k_proj.weight": key.reshape(-1, WIDTH),
        "v_proj.weight": value.reshape(-1, WIDTH),
    }


def test_interleaved_heads_of_megatron(tmp_path: Path) -> None:
    stored = {"linear_qkv.weight": numbered((HEADS + 2 * GROUPS) * HEAD, WIDTH)}
    save_file(stored, tmp_path / "model.safetensors")
    table = ckpt.trace_mapping(megatron, tmp_path)
    by_rule = ckpt.MappingTable(
        [
            ckpt.Split(
                "linear_qkv.weight",
                ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
                sizes=(HEADS // GROUPS * HEAD, HEAD, HEAD),
                groups=GROUPS,
            )
        ]
    )
    expected = megatron(stored)
    for mapping in (table, by_rule):
        check_ratio(tmp_path, mapping, expected, dict.fromkeys(expected, Shard(0)))
        check_ratio(tmp_path, mapping, expected, dict.fromkeys(expected, Shard(0)), read_once=True)
        columns = check_ratio(
            tmp_path, mapping, expected, dict.fromkeys(expected, Shard(1)), read_once=True
        )
        assert columns[0].read_once
        assert sum(report.bytes_read for report in columns) == stored["linear_qkv.weight"].nbytes


class Parallel(nn.Module):
    """A layer of which a rank holds its heads and rows alone, as vLLM and SGLang have them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros((HEADS + 2 * GROUPS) * HEAD // TP, WIDTH))
        self.gate_up = nn.Parameter(torch.zeros(2 * 64 // TP, WIDTH))

    def load_qkv(self, param: nn.Parameter, loaded: Tensor, shard_id: str) -> None:
        query, key = HEADS * HEAD // TP, GROUPS * HEAD // TP
        offset, size = {"q": (0, query), "k": (query, key), "v": (query + key, key)}[shard_id]
        param.data.narrow(0, offset, size).copy_(loaded.narrow(0, self.rank * size, size))

    def load_gate_up(self, param: nn.Parameter, loaded: Tensor, shard_id: int) -> None:
        size = param.shape[0] // 2
        param.data.narrow(0, shard_id * size, size).copy_(loaded.narrow(0, self.rank * size, size))

    def load_weights(self, weights: Weights) -> None:
        for name, loaded in weights.items():
            if name.startswith("mlp"):
                self.load_gate_up(self.gate_up, loaded, int("up" in name))
            else:
                self.load_qkv(self.qkv, loaded, name[5])


def test_weight_loaders_of_one_rank(tmp_path: Path) -> None:
    stored = {
        "attn.q_proj.weight": numbered(HEADS * HEAD, WIDTH),
        "attn.k_proj.weight": numbered(GROUPS * HEAD, WIDTH),
        "attn.v_proj.weight": numbered(GROUPS * HEAD, WIDTH),
        "mlp.gate_proj.weight": numbered(64, WIDTH),
        "mlp.up_proj.weight": numbered(64, WIDTH),
    }
    save_file(stored, tmp_path / "model.safetensors")
    read = needed = 0
    for rank in range(TP):
        expected, model = Parallel(rank), Parallel(rank)
        with torch.no_grad():
            expected.load_weights(stored)
        table = ckpt.trace_mapping(model.load_weights, tmp_path, model)
        report = ckpt.load(model, tmp_path, mapping=table, no_dist=True)
        assert model.qkv.equal(expected.qkv)
        assert model.gate_up.equal(expected.gate_up)
        read += report.bytes_read
        needed += report.bytes_needed
    assert needed == sum(value.nbytes for value in stored.values())
    assert read <= MOST * needed


def gpt2(weights: Weights) -> Weights:
    """Weights of Conv1D have inputs before outputs."""
    made: Weights = {}
    for name, value in weights.items():
        layer, _, kind = name.rpartition(".")
        if layer.endswith("c_attn"):
            for part, of in zip(value.chunk(3, dim=-1), "qkv", strict=True):
                made[f"{layer[:-6]}{of}_proj.{kind}"] = part.t().contiguous()
        elif value.dim() == 2:
            made[name] = value.t()
        else:
            made[name] = value
    return made


def test_transposed_weights_of_gpt2(tmp_path: Path) -> None:
    stored = {
        "h.0.attn.c_attn.weight": numbered(WIDTH, 3 * WIDTH),
        "h.0.attn.c_attn.bias": numbered(3 * WIDTH),
        "h.0.mlp.c_fc.weight": numbered(WIDTH, 4 * WIDTH),
        "h.0.mlp.c_proj.weight": numbered(4 * WIDTH, WIDTH),
    }
    save_file(stored, tmp_path / "model.safetensors")
    table = ckpt.trace_mapping(gpt2, tmp_path)
    expected = {name: value.contiguous() for name, value in gpt2(stored).items()}
    placements: dict[str, Placement] = {name: Shard(0) for name in expected}
    placements["h.0.mlp.c_proj.weight"] = Shard(1)
    reports = check_ratio(tmp_path, table, expected, placements, read_once=True)
    assert reports[0].read_once
    assert sum(report.bytes_received for report in reports) > 0


def padded(weights: Weights, size: int) -> Weights:
    """A vocabulary that ranks can share evenly."""
    rows, width = weights["wte"].shape
    embedding = torch.zeros(size, width)
    embedding[:rows].copy_(weights["wte"])
    return {
        "embedding": embedding,
        "output": nn.functional.pad(weights["head"], (0, 0, 0, size - rows)),
    }


@pytest.mark.parametrize("read_once", [None, True])
def test_padded_vocabularies(tmp_path: Path, read_once: bool | None) -> None:
    stored = {"wte": numbered(101, WIDTH), "head": numbered(101, WIDTH)}
    save_file(stored, tmp_path / "model.safetensors")
    table = ckpt.trace_mapping(lambda weights: padded(weights, 128), tmp_path)
    expected = padded(stored, 128)
    check_ratio(tmp_path, table, expected, dict.fromkeys(expected, Shard(0)), read_once=read_once)
    check_ratio(tmp_path, table, expected, dict.fromkeys(expected, Shard(1)), read_once=True)


def test_ranks_with_other_mappings_are_refused(tmp_path: Path) -> None:
    save_file({"a": numbered(4), "b": numbered(4)}, tmp_path / "model.safetensors")
    given: list[Callable[[], Any]] = [lambda: [ckpt.Move("a", "c")], lambda: [ckpt.Move("b", "c")]]

    def load(rank: int, group: Any) -> str:
        state = {"c": torch.zeros(4)}
        with pytest.raises(ckpt.LayoutMismatch) as error:
            ckpt.load(state, tmp_path, mapping=given[rank](), process_group=group, strict=False)
        return str(error.value)

    for told in run_ranks(2, load):
        assert "this rank was given another mapping= than rank 0" in told


def test_rows_that_two_tensors_take_are_read_by_each_rank(tmp_path: Path) -> None:
    stored = {"w": numbered(64, 32)}
    save_file(stored, tmp_path / "model.safetensors")
    table = ckpt.trace_mapping(lambda w: {"all": w["w"].t(), "some": w["w"][:40].t()}, tmp_path)
    expected = {"all": stored["w"].t(), "some": stored["w"][:40].t()}
    rows = dict.fromkeys(expected, Shard(0))
    reports = check_ratio(tmp_path, table, expected, rows, read_once=True, most=4)
    assert not reports[0].read_once  # a box of one and one of the other share elements
