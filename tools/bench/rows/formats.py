"""Loads from files of other programs, and conversions from and to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as _dcp

from dtckpt import checkpoint
from dtckpt.dtensor import Mesh

from ..folders import fresh, sync_files, warm
from ..frame.contest import Contestant, compete
from ..frame.row import OURS, Bar, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.hugging_face import DcpHuggingFace, RawSlices, Slices
from ..peers.ours import Ours
from ..state import Shape, ShardedState, transformer
from ..systems import line_mesh
from .contestants import COSTS

_NUM_FILES = 8
_PIECE_BYTES = 16 << 20
_MODEL = "model/"
_TO_DCP, _TO_SAFETENSORS, _COPY = f"{OURS}, to DCP", f"{OURS}, to safetensors", "copy"

# Its functions are annotated in part.
_api: Any = _dcp


def _weights(setting: Setting) -> Iterator[Shape]:
    """Yield the weights alone of a transformer, of about as many bytes as the setting says."""
    for shape in transformer(5 * setting.size, setting.layers):  # of which a fifth are weights
        if shape.name.startswith(_MODEL):
            yield Shape(name=shape.name[len(_MODEL) :], shape=shape.shape, dtype=shape.dtype)


def _write(team: Team, setting: Setting) -> Path:
    """Write a directory of safetensors files with an index, together."""
    state = ShardedState(line_mesh(team.size), _weights(setting), 0, fill=True)
    saved, weights = team.folder / "saved", team.folder / "weights"
    fresh(team, weights)
    checkpoint.save(state.tensors, saved)
    most = setting.size // _NUM_FILES
    checkpoint.export(saved, weights, max_file_bytes=most, process_group=state.group)
    fresh(team, saved)
    return weights


def _load(dim: int, team: Team, setting: Setting) -> Outcome:
    weights = _write(team, setting)
    state = ShardedState(line_mesh(team.size), _weights(setting), dim, fill=False)

    def before() -> None:
        state.clear()
        warm(team, weights)

    systems = (Ours(), DcpHuggingFace(), Slices(), *([] if dim else [RawSlices()]))
    contestants = [
        Contestant(
            name=system.name,
            before=before,
            call=partial(system.load, state, weights),
            after=state.check,
        )
        for system in systems
    ]
    outcome = compete(team, contestants, setting.rounds)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _convert(team: Team, setting: Setting) -> Outcome:
    """Convert on one process, beside copying the same files."""
    source, target = team.folder / "source", team.folder / "target"
    state = ShardedState(line_mesh(1), transformer(setting.size, setting.layers), 0, fill=True)
    _api.save(dict(state.tensors), checkpoint_id=source, process_group=state.group)
    mine = team.folder / "mine"
    checkpoint.save(state.tensors, mine)

    def before(path: Path) -> None:
        fresh(team, target)
        warm(team, path)

    mesh, rules = Mesh.parse("dp=1"), checkpoint.parse_rules("*=R")
    calls = {
        OURS: (source, partial(checkpoint.reshard, source, target, mesh, rules)),
        _TO_DCP: (mine, partial(checkpoint.export, mine, target, format="dcp")),
        _TO_SAFETENSORS: (mine, partial(checkpoint.export, mine, target)),
        _COPY: (source, partial(_copy, source, target)),
    }
    contestants = [
        Contestant(name=name, before=partial(before, path), call=call)
        for name, (path, call) in calls.items()
    ]
    outcome = compete(team, contestants, setting.rounds)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _copy(source: Path, target: Path) -> None:
    """Read all files and write them durably elsewhere, a piece after the other."""
    target.mkdir()
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as old, (target / path.name).open("wb", 0) as new:
            os.posix_fallocate(new.fileno(), 0, path.stat().st_size)
            while count := old.readinto(buffer):
                new.write(buffer[:count])
        sync_files(target / path.name)


_FROM_WEIGHTS = (OURS, "DCP", "safetensors")
HUGGING_FACE_ROWS = Row(
    name="hf-rows",
    title="Load a Hugging Face directory into Shard(0)",
    what="Weights in safetensors files with an index into the tensors that are there, all files in "
    "the page cache. DCP reads by its HuggingFaceStorageReader.",
    columns=COSTS,
    bars=(Bar(metric="seconds", against="DCP", limit=0.5),),
    systems=(*_FROM_WEIGHTS, "raw"),
    run=partial(_load, 0),
)
HUGGING_FACE_COLUMNS = Row(
    name="hf-columns",
    title="Load a Hugging Face directory into Shard(1)",
    what="As above.",
    columns=COSTS,
    bars=(Bar(metric="seconds", against="DCP", limit=1.0),),
    systems=_FROM_WEIGHTS,
    run=partial(_load, 1),
)
CONVERT = Row(
    name="convert",
    title="Convert from DCP, to DCP and to safetensors",
    what="Ours from DCP by reshard, and the other ways by export; one process, in bounded memory, "
    "until all is durable, what is read in the page cache. Beside it a copy of the files of DCP "
    "by system calls.",
    columns=COSTS,
    bars=(Bar(metric="seconds", against=_COPY, limit=1.3),),
    systems=(OURS, _TO_DCP, _TO_SAFETENSORS, _COPY),
    run=_convert,
    ranks=lambda _: 1,
)
