"""Files of ranks that accelerate writes with ``use_dcp=False``."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import fsdp_utils
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard

import dtckpt.checkpoint as ckpt
from tests.in_turn import in_turn

from ..test_dcp import same, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


def stepped(mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after a step with gradients of one, whole or spread over a mesh."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_a_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_utils, "logger", logging.getLogger("accelerate"))  # without a state
    plugin: Any = SimpleNamespace(
        state_dict_type=StateDictType.SHARDED_STATE_DICT, fsdp_version=2, state_dict_config=None
    )

    def save(rank: int) -> None:
        model, optimizer = stepped(init_device_mesh("cpu", (3,)))
        own: Any = SimpleNamespace(process_index=rank, num_processes=3)
        fsdp_utils.save_fsdp_model(plugin, own, model, tmp_path, use_dcp=False)
        fsdp_utils.save_fsdp_optimizer(plugin, own, optimizer, model, tmp_path, use_dcp=False)

    in_turn(3, save)
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    model, optimizer = stepped()
    found = ckpt.open(tmp_path)
    assert found.metadata == {"passed_over": ["random_states_0.pkl"]}
    assert "passed over random_states_0.pkl" in caplog.text
    state = whole(found.state_dict())
    assert same(state["pytorch_model_fsdp_0"], dict(model.state_dict()))
    for name, parameter in model.named_parameters():
        moments = state["optimizer_0"]["state"][name]
        assert same(moments, optimizer.state[parameter])
