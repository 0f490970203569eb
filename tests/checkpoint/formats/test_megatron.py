"""Checkpoints of Megatron, which megatron-core made of a GPT on two ranks (``makers``)."""

from __future__ import annotations

import io
import json
import logging
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh, Shard, distribute_tensor
from dtckpt.errors import CheckpointError, Corrupt

from ...dtensor.rank_meshes import run_on_mesh
from .makers import unpacked
from .makers.make_megatron_before_014 import FULL
from .test_dcp import Poison, same, whole

QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return what Megatron made."""
    return unpacked("megatron-core-0.16.1", tmp_path / "iter_0000010")


def expected(made: Path) -> dict[str, Tensor]:
    found = torch.load(made / "expected.pt")
    return {name: tensor for name, tensor in found.items() if not name.startswith("logits")}


def test_tensors_are_what_megatron_loads(made: Path) -> None:
    opened = ckpt.open(made)
    for name, tensor in expected(made).items():
        assert opened[name][...].equal(tensor), name
    assert opened[QKV].shape == (2, 16, 8)  # layers are stacked
    assert ckpt.verify(made).problems == ()


def test_what_is_equal_on_all_ranks(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened = ckpt.open(made)
    found = whole(opened.state_dict())
    assert found["iteration"] == 10
    assert found["args"] == {"num_layers": 2, "lr": 0.01, "seed": 1}
    assert found["opt_param_scheduler"] == {"max_lr": 0.01, "num_steps": 80}
    assert found["optimizer"]["state"]["common_step"] == 1
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    left_out = {"args/attention_backend": "megatron.core.transformer.enums.AttnBackend"}
    assert opened.metadata == {"left_out": left_out, "passed_over": ["expected.pt"]}
    assert "left out objects of Megatron: args/attention_backend" in caplog.text


def test_objects_of_single_ranks(made: Path) -> None:
    found = whole(ckpt.open(made).state_dict())
    assert found["decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"] == [None]
    for rank in range(2):
        ((state,),) = found[f"rng_state/shard_0.{rank}_1.2"]
        drawn = random.Random(100 + rank)
        assert state["random_rng_state"] == drawn.getstate()
        torch_rng = torch.Generator().manual_seed(100 + rank)
        assert state["torch_rng_state"].equal(torch_rng.get_state())


def test_each_rank_reads_its_part(made: Path) -> None:
    full = expected(made)[QKV]

    def body(mesh: Any) -> int:
        into = {QKV: distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)])}
        told = ckpt.load(into, made, select=QKV, process_group=mesh.get_group())
        assert into[QKV].full_tensor().equal(full)
        return told.bytes_read

    assert run_on_mesh((2,), body) == [full.nbytes // 2] * 2


def test_it_becomes_a_checkpoint_of_ours(made: Path, tmp_path: Path) -> None:
    ckpt.reshard(made, tmp_path / "ours", Mesh.parse("tp=2"), ckpt.parse_rules(f"{QKV}=S(1)"))
    ours = ckpt.open(tmp_path / "ours")
    assert ours[QKV][...].equal(expected(made)[QKV])
    assert same(whole(ours.state_dict()), whole(ckpt.open(made).state_dict()))


def test_tensors_that_were_flattened_before_014(tmp_path: Path) -> None:
    opened = ckpt.open(unpacked("megatron-core-0.12.2", tmp_path))
    assert opened["optimizer.state.exp_avg.w"][...].equal(FULL)
    assert opened["optimizer.state.exp_avg.w"][1, 2:5, 1].equal(FULL[1, 2:5, 1])
    assert opened["w"][...].equal(FULL[0])
    assert ckpt.verify(tmp_path).problems == ()


def test_extra_state_in_a_stream_is_its_bytes(made: Path) -> None:
    torch.save({"state": io.BytesIO(b"\x00words")}, made / "common.pt")
    assert ckpt.open(made).state_dict()["state"] == b"\x00words"


def remove(name: str) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        (place / name).unlink()

    return damage


def take_another_backend(place: Path) -> None:
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def poison_common(place: Path) -> None:
    torch.save({"args": Poison()}, place / "common.pt")


def poison_metadata(place: Path) -> None:
    (place / ".metadata").write_bytes(pickle.dumps(Poison()))


def name_a_tensor_twice(place: Path) -> None:
    torch.save({QKV: 1}, place / "common.pt")


def flatten(place: Path) -> None:
    told = pickle.loads((place / ".metadata").read_bytes())
    old = {"nd_reformulated_orig_global_shape": (2, 16, 9)}
    vars(told).update(mcore_data={QKV: old})
    (place / ".metadata").write_bytes(pickle.dumps(told))


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (remove("common.pt"), Corrupt, "common.pt: this file of the checkpoint is missing"),
        (remove(".metadata"), Corrupt, ".metadata: this file of the checkpoint is missing"),
        (remove("metadata.json"), Corrupt, "metadata.json is missing, which Megatron writes last"),
        (remove("__1_0.distcp"), Corrupt, "__1_0.distcp: this file of the checkpoint is missing"),
        (take_another_backend, CheckpointError, "sharded_backend is 'zarr'; dtckpt reads 'torch_"),
        (poison_common, CheckpointError, "common.pt: the pickle asks for builtins.getattr"),
        (poison_metadata, CheckpointError, ".metadata: the pickle asks for builtins.getattr"),
        (name_a_tensor_twice, Corrupt, f"common.pt: has '{QKV}', as .metadata has"),
        (flatten, Corrupt, r"malformed metadata.*shape \(2, 16, 9\) was flattened to \(2, 16, 8\)"),
    ],
)
def test_what_is_wrong_is_told(
    made: Path, damage: Callable[[Path], None], error: type[Exception], told: str
) -> None:
    damage(made)
    with pytest.raises(error, match=told):
        ckpt.open(made)
    assert not Poison.ran
