"""Which systems there are in this process, and the mesh that they all work on."""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh

from .frame.setting import Setting
from .frame.team import Team
from .peers.base import Missing, System
from .peers.dcp import Dcp
from .peers.ours import Ours
from .peers.raw import Raw
from .peers.safetensors_files import SafetensorsFiles
from .peers.torch_checkpointing import NAME, TorchCheckpointing
from .state import ShardedState, transformer


@cache
def line_mesh(size: int) -> DeviceMesh:
    """Return the mesh of the first ``size`` ranks of the team; all ranks call this."""
    return DeviceMesh("cpu", list(range(size)))


def sharded_state(team: Team, setting: Setting, *, factor: float = 1.0) -> ShardedState:
    """Return the state of a run, or a part of it, cut by rows over all ranks of the team."""
    shapes = transformer(int(setting.size * factor), setting.layers)
    return ShardedState(line_mesh(team.size), shapes, 0, fill=True)


@cache
def sharded_systems() -> tuple[tuple[System, ...], dict[str, str]]:
    """Return the systems that save and load shards, and why others are missing."""
    systems: list[System] = [Ours(), Dcp()]
    missing: dict[str, str] = {}
    try:
        systems.append(TorchCheckpointing())
    except Missing as error:
        missing[NAME] = str(error)
    return (*systems, SafetensorsFiles(), Raw()), missing
