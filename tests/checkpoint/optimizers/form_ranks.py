"""Two ranks of FSDP2 whose optimizer keeps state in many forms; see ``test_forms``."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dtckpt.checkpoint as ckpt

from ...processes import join_group, leave_group

STEPS = 16_777_217
"""No float32 has this number."""


class ManyForms(torch.optim.Optimizer):
    """Keeps what optimizers keep beside sharded parameters, as a function of the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        del closure
        for param in self.param_groups[0]["params"]:
            whole = param.full_tensor().detach().float()
            mesh, cut = param.device_mesh, param.placements
            whole_everywhere = [Replicate()] * mesh.ndim
            self.state[param] = {
                "exp_avg": distribute_tensor(whole + 1, mesh, cut),
                "gathered": whole + 2,  # of the parameter's shape, and plain: Muon's momentum
                "norms": [torch.arange(5.0), (torch.tensor([STEPS]), {"deep": torch.ones(3)})],
                "rows": distribute_tensor(whole[:, :1] + 3, mesh, cut),
                "columns": distribute_tensor(whole[:1] + 4, mesh, whole_everywhere),
                "flat": distribute_tensor(whole.flatten() + 5, mesh, cut),
                "everywhere": distribute_tensor(whole + 6, mesh, whole_everywhere),
                "step": torch.tensor(STEPS),
            }


def _model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False)).bfloat16()
    return cast(nn.Module, fully_shard(model, mesh=mesh))


def _leaves(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {n: t for key, item in items for n, t in _leaves(item, f"{name}/{key}").items()}


def _compare(one: dict[str, Any], other: dict[str, Any], cuts: dict[str, Any] | None) -> None:
    ours, theirs = _leaves(one), _leaves(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        found = theirs[name]
        assert found.dtype == tensor.dtype, name
        assert isinstance(found, DTensor) == isinstance(tensor, DTensor), name
        if isinstance(tensor, DTensor) and isinstance(found, DTensor):
            wanted = tensor.placements if cuts is None else cuts[name.strip("/")]
            assert tuple(found.placements) == tuple(wanted), (name, found.placements)
            assert torch.equal(found.full_tensor(), tensor.full_tensor()), name
        else:
            assert torch.equal(found, tensor), name


def main(folder: str) -> None:
    """Save, and load into fresh and used optimizers on the same mesh and on another one."""
    join_group()
    line, square = (
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "shard")),
    )
    model = _model(line)
    optimizer = ManyForms(model.parameters())
    optimizer.step()
    ckpt.save({"model": model, "opt": optimizer}, folder)
    cut = (Replicate(), Shard(0))
    whole = (Replicate(), Replicate())
    on_square = {"exp_avg": cut, "rows": cut, "flat": cut, "columns": whole, "everywhere": whole}
    for mesh, cuts in ((line, None), (square, on_square)):
        for was_used in (False, True):
            other = _model(mesh)
            loaded = ManyForms(other.parameters())
            if was_used:
                loaded.step()
                for state in loaded.state.values():
                    state["gathered"] = state["gathered"].bfloat16()
                    state["rows"], state["later"] = torch.zeros(7), torch.zeros(1)
            ckpt.load({"model": other, "opt": loaded}, folder)
            pairs = zip(optimizer.state.values(), loaded.state.values(), strict=True)
            for state, found in pairs:
                _compare(state, found, cuts)
    leave_group()
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
