"""What is quantized by blocks: as it is stored, and as the numbers that it stands for."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import Dequantize, Merge, Move, Permute
from dtckpt.checkpoint.mapping import dequantized
from dtckpt.checkpoint.mapping.changes import MappingRule
from dtckpt.checkpoint.reading import limits
from dtckpt.checkpoint.reading.wants import ArraySink
from dtckpt.dtensor import Box, Mesh, Shard, distribute_tensor
from dtckpt.errors import LayoutMismatch

from ...dtensor.rank_meshes import run_on_mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own

EIGHT_BITS = torch.float8_e4m3fn


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def eight_bits(*shape: int) -> Tensor:
    return torch.randn(*shape).mul(30).to(EIGHT_BITS)


def weights() -> dict[str, Tensor]:
    """Tensors as DeepSeek-V3 and gpt-oss have them, with edges within blocks."""
    torch.manual_seed(0)
    return {
        "a.weight": eight_bits(300, 200),
        "a.weight_scale_inv": torch.rand(3, 2) + 0.1,
        "b.weight": eight_bits(256, 128),
        "b.weight_scale_inv": torch.rand(2, 1) + 0.1,
        "experts.gate_up_proj_blocks": torch.randint(0, 256, (3, 8, 5, 16), dtype=torch.uint8),
        "experts.gate_up_proj_scales": torch.randint(100, 150, (3, 8, 5), dtype=torch.uint8),
        "experts.gate_up_proj_bias": torch.randn(3, 8).bfloat16(),
        "norm.weight": torch.randn(7).bfloat16(),
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Several files: scales are not beside what they are for."""
    given, made = weights(), tmp_path / "hf"
    made.mkdir()
    files = {name: f"model-0000{1 + ('scale' in name)}-of-00002.safetensors" for name in given}
    for file in set(files.values()):
        save_file({n: t for n, t in given.items() if files[n] == file}, made / file)
    told = {"metadata": {"total_size": 0}, "weight_map": files}
    (made / "model.safetensors.index.json").write_text(json.dumps(told))
    return made


def of_transformers(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the library of Hugging Face makes of them."""
    mxfp4: Any = importlib.import_module("transformers.integrations.mxfp4")
    eight: Any = importlib.import_module("transformers.integrations.finegrained_fp8")
    one = eight.Fp8Dequantize(None)._dequantize_one
    experts = mxfp4.convert_moe_packed_tensors(
        given["experts.gate_up_proj_blocks"], given["experts.gate_up_proj_scales"], dtype=dtype
    )
    return {
        "b.weight": one(given["b.weight"], given["b.weight_scale_inv"], dtype),
        "experts.gate_up_proj": experts.transpose(1, 2),
        **{n: given[n] for n in ("experts.gate_up_proj_bias", "norm.weight")},
    }


def by_hand(codes: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    wide = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return (codes.float() * wide[: codes.shape[0], : codes.shape[1]]).to(dtype)


def wanted(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    given = weights()
    first = by_hand(given["a.weight"], given["a.weight_scale_inv"], 128, dtype)
    return {"a.weight": first, **of_transformers(given, dtype)}


def test_as_it_is_stored_it_goes_through_every_way(place: Path, tmp_path: Path) -> None:
    given = weights()
    ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=2"), ckpt.parse_rules("*=S(0)"))
    ckpt.export(tmp_path / "ours", tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    into = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    ckpt.load(into, tmp_path / "ours", no_dist=True)
    for name, tensor in given.items():
        assert again[name].dtype == into[name].dtype == tensor.dtype
        assert bits(again[name]).equal(bits(tensor))
        assert bits(into[name]).equal(bits(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_numbers_are_those_of_transformers(place: Path, dtype: torch.dtype) -> None:
    found = ckpt.open(place, mapping=[Dequantize(dtype=str(dtype))])
    expected = wanted(dtype)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert bits(found[name][...]).equal(bits(tensor)), name
    assert found["a.weight"][130:290:7, 127:129].equal(expected["a.weight"][130:290:7, 127:129])
    cut = found["experts.gate_up_proj"][1:, 3, 45:99]
    assert cut.equal(expected["experts.gate_up_proj"][1:, 3, 45:99])


def test_numbers_are_those_of_torchs_reader(place: Path) -> None:
    """Of 8 bits alone: of MXFP4 it fills only as many columns as there are groups (torch 2.13)."""
    into = {name: torch.zeros(300, 200, dtype=torch.bfloat16) for name in ("a.weight",)}
    reader = QuantizedHuggingFaceStorageReader(str(place), target_dtype=torch.bfloat16)
    torch_dcp.load(into, storage_reader=reader, no_dist=True)
    assert ckpt.open(place, mapping=[Dequantize()])["a.weight"][...].equal(into["a.weight"])


@pytest.mark.parametrize("step", [97, 1 << 18])
@pytest.mark.parametrize("read_bytes", [100, 16 << 20])
def test_it_is_made_in_small_steps(place: Path, step: int, read_bytes: int) -> None:
    expected = wanted()
    with (
        mock.patch.object(dequantized, "_STEP_ELEMENTS", step),
        mock.patch.multiple(limits, READ_BYTES=read_bytes, STEP_BYTES=64),
    ):
        found = ckpt.open(place, mapping=[Dequantize()])
        for name, tensor in expected.items():
            assert bits(found[name][...]).equal(bits(tensor)), name


def test_each_rank_reads_codes_and_scales_of_its_part(place: Path) -> None:
    expected = wanted()

    def body(mesh: Any) -> int:
        group, total = mesh.get_group(), 0
        for dim in (0, 1):
            into = {
                name: distribute_tensor(torch.zeros_like(expected[name]), mesh, [Shard(dim)])
                for name in ("a.weight", "experts.gate_up_proj")
            }
            told = ckpt.load(into, place, mapping=[Dequantize()], strict=False, process_group=group)
            assert all(bits(t.full_tensor()).equal(bits(expected[n])) for n, t in into.items())
            total += told.bytes_read if dim == 0 else 0
        return total

    given = weights()
    needed = sum(given[n].nbytes for n in given if "bias" not in n and n[0] in "ae")
    read = run_on_mesh((4,), body)
    assert sum(read) < 1.1 * needed


def test_a_checkpoint_of_ours_that_cuts_groups(place: Path, tmp_path: Path) -> None:
    rules = ckpt.parse_rules("*_blocks=S(3); *_scales=S(2); a.*=S(1)")
    ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=3"), rules)
    found = ckpt.open(tmp_path / "ours", mapping=[Dequantize()])
    for name, tensor in wanted().items():
        assert bits(found[name][...]).equal(bits(tensor)), name


def test_it_becomes_a_checkpoint_and_an_export(place: Path, tmp_path: Path) -> None:
    expected = wanted()
    ckpt.reshard(
        place,
        tmp_path / "ours",
        Mesh.parse("a=2"),
        ckpt.parse_rules("*=S(0)"),
        mapping=[Dequantize()],
    )
    assert ckpt.verify(tmp_path / "ours").problems == ()
    ckpt.export(place, tmp_path / "one.safetensors", mapping=[Dequantize()])
    loaded, ours = load_file(tmp_path / "one.safetensors"), ckpt.open(tmp_path / "ours")
    for name, tensor in expected.items():
        assert bits(loaded[name]).equal(bits(tensor))
        assert bits(ours[name][...]).equal(bits(tensor))


def test_other_rules_follow(place: Path) -> None:
    expected = wanted()
    rules: list[MappingRule] = [
        Dequantize(),
        Permute("experts.gate_up_proj", "experts.gate_up_proj", (0, 2, 1)),
        Merge(("a.weight", "b.wide"), "ab", dim=0),
        Move("norm.weight", "norm"),
    ]
    with pytest.raises(LayoutMismatch, match="rule 2 of the mapping"):
        ckpt.open(place, mapping=rules)
    found = ckpt.open(place, mapping=[rules[0], rules[1], rules[3], Move("b.weight", "b")])
    turned = expected["experts.gate_up_proj"].transpose(1, 2)
    assert found["experts.gate_up_proj"][...].equal(turned)
    assert found["experts.gate_up_proj"][1, 40:90].equal(turned[1, 40:90])
    assert found["b"][...].equal(expected["b.weight"])
    with pytest.raises(LayoutMismatch, match="has to come before"):
        ckpt.open(place, mapping=[rules[3], rules[0]])


SCALES: dict[str, tuple[Tensor, Tensor]] = {
    "of rows": (torch.rand(6, 1) + 0.1, torch.arange(6)),
    "of all": (torch.tensor(0.25), torch.zeros(6, dtype=torch.int64)),
    "one": (torch.tensor([0.25]), torch.zeros(6, dtype=torch.int64)),
    "a list": (torch.rand(6) + 0.1, torch.arange(6)),
    "half": (torch.rand(6, 1).bfloat16(), torch.arange(6)),
    "exponents": (torch.full((6, 1), 0.5).to(torch.float8_e8m0fnu), torch.arange(6)),
}


@pytest.mark.parametrize("name", SCALES)
def test_other_scales_of_eight_bits(tmp_path: Path, name: str) -> None:
    scale, rows = SCALES[name]
    codes = eight_bits(6, 10)
    save_file({"w": codes, "w_scale": scale}, tmp_path / "model.safetensors")
    found = ckpt.open(tmp_path, mapping=[Dequantize(dtype="float32")])["w"][...]
    assert found.equal(codes.float() * scale.float().reshape(-1)[rows][:, None])


def test_four_bits_of_nvidia(tmp_path: Path) -> None:
    codes = torch.randint(0, 256, (6, 32), dtype=torch.uint8)
    scale, whole = eight_bits(6, 4), torch.tensor(0.03)
    given = {"w": codes, "w_scale": scale, "w_scale_2": whole, "other": codes.clone()}
    save_file(given, tmp_path / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([values, -values])
    flat = torch.stack([table[(codes % 16).long()], table[(codes // 16).long()]], -1).flatten(1)
    expected = flat * scale.float().repeat_interleave(16, 1) * whole
    found = ckpt.open(tmp_path, mapping=[Dequantize(dtype="float32")])
    assert found["w"][...].equal(expected)
    assert found["w"][2:4, 15:50].equal(expected[2:4, 15:50])
    assert found["other"].dtype == torch.uint8


def test_codes_wait_for_all_scales_in_whatever_order_they_come(tmp_path: Path) -> None:
    stored = {
        "w": torch.randint(0, 256, (6, 32), dtype=torch.uint8),
        "w_scale": eight_bits(6, 4),
        "w_scale_2": torch.tensor(0.5),
    }
    save_file(stored, tmp_path / "model.safetensors")
    opened = ckpt.open(tmp_path, mapping=[Dequantize(dtype="float32")])
    expected = opened["w"][...]
    recipe = opened.manifest.tensors["w"].recipe
    assert isinstance(recipe, dequantized.Dequantized)
    whole = Box.whole(expected.shape)
    for order in permutations(range(5)):  # codes and small scales come in halves
        made = np.zeros(whole.sizes, np.uint32)
        puts: list[Callable[[], None]] = []
        for tensor, box, sink in recipe.parts(whole, ArraySink(made)):
            as_ints = stored[tensor.name].view(getattr(torch, f"int{8 * tensor.dtype.itemsize}"))
            items = as_ints.numpy().view(f"u{tensor.dtype.itemsize}")
            halves = Box.whole(box.sizes).parts(max(box.numel // 2, 1))
            puts += [partial(sink.put, part, items[part.slices]) for part in halves]
        for i in order:
            puts[i]()
        assert torch.from_numpy(made.view(np.float32)).equal(expected), order


def test_what_does_not_fit_is_named(place: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match=r"no tensor that fits 'x.*' has scales"):
        ckpt.open(place, mapping=[Dequantize("x.{rest*}")])
    save_file({"w": eight_bits(10, 10), "w_scale": torch.ones(3, 3)}, tmp_path / "odd.safetensors")
    with pytest.raises(LayoutMismatch, match=r"'w' of shape \(10, 10\): 'w_scale' of float32\[3"):
        ckpt.open(tmp_path / "odd.safetensors", mapping=[Dequantize()])
    with pytest.raises(ValueError, match="expected one of float32"):
        Dequantize(dtype="int8")
    with pytest.raises(LayoutMismatch, match="no inverse"):
        ckpt.MappingTable([Dequantize()]).inverse()
    table = ckpt.MappingTable([Dequantize("a.{n*}", dtype="float32", block=64)])
    assert ckpt.MappingTable.from_json(table.to_json()) == table


def test_only_what_is_named_is_changed(place: Path) -> None:
    found = ckpt.open(place, mapping=[Dequantize("a.{rest*}")])
    assert found["a.weight"].dtype == torch.bfloat16
    assert found["b.weight"].dtype == EIGHT_BITS
    assert "b.weight_scale_inv" in found
