"""Saves and loads over HTTP, beside the drivers alone; and how many requests they take."""

from __future__ import annotations

import time
from functools import partial

import torch

from dtckpt import checkpoint
from dtckpt.dtensor import Mesh
from dtckpt.storage import open_store

from ..frame.contest import Contestant, compete, prepare
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..frame.timing import turns
from ..object_server import SERVER, ObjectServer, object_server
from ..peers.object_stores import (
    DCP,
    OURS_S3FS,
    RAW_OBSTORE,
    RAW_S3FS,
    SYSTEMS,
    ObjectSystem,
    object_systems,
    why_no_obstore,
)
from ..state import ShardedState
from ..systems import sharded_state
from .contestants import COSTS

_LATENCY = 0.020
_NUM_FILES, _FEW_FILES = 512, 8
_LEAST_FILE_BYTES = 64 << 10
_REQUEST_BYTES, _FETCH_BYTES = 1 << 20, 16 << 20
_BUDGET_BYTES = 224 << 20
"""Of a save: six parts of 16 MiB, and two more for each of four that are on their way; a load needs
less. docs/storage.md says so."""


def _run(team: Team, setting: Setting, *, is_load: bool) -> Outcome:
    state = sharded_state(team, setting)
    with object_server(team, SERVER) as server:
        systems, missing = object_systems(server, state)
        if is_load:
            saves = {system.name: partial(system.save, state) for system in systems}
            missing = missing | prepare(team, saves)
        contestants = [_contestant(team, server, state, s, is_load=is_load) for s in systems]
        outcome = compete(team, contestants, setting.rounds, skipped=missing)
    outcome.add_rate(state.global_bytes)
    outcome.facts |= {"state_bytes": state.global_bytes, "server": SERVER}
    return outcome


def _contestant(
    team: Team, server: ObjectServer, state: ShardedState, system: ObjectSystem, *, is_load: bool
) -> Contestant:
    if not is_load:

        def clear() -> None:
            server.clear(system.name)
            team.barrier()

        return Contestant(name=system.name, before=clear, call=partial(system.save, state))
    if system.name in (RAW_S3FS, RAW_OBSTORE):  # which hand out bytes
        return Contestant(name=system.name, call=partial(system.load, state))
    return Contestant(
        name=system.name, before=state.clear, call=partial(system.load, state), after=state.check
    )


def _run_requests(team: Team, setting: Setting) -> Outcome:
    num_files = _NUM_FILES if setting.size >= _NUM_FILES * _LEAST_FILE_BYTES else _FEW_FILES
    tensor = torch.arange(setting.size // 4, dtype=torch.int32).reshape(num_files, -1)
    outcome = Outcome(facts={"files": num_files, "state_bytes": tensor.nbytes})
    with object_server(team) as server:
        url, options = server.url("files"), server.options
        checkpoint.save({"w": tensor}, team.folder / "one", no_dist=True)
        rules = checkpoint.parse_rules("w=S(0)")
        with open_store(url, **options) as store:
            checkpoint.reshard(team.folder / "one", store, Mesh.parse(f"x={num_files}"), rules)
        server.set_latency(_LATENCY)
        engines = {OURS: "obstore", OURS_S3FS: "fsspec"}
        if (missing := why_no_obstore()) is not None:
            engines = {OURS: "fsspec"}
            outcome.skipped[OURS_S3FS] = missing
        for turn, name in turns(list(engines), setting.rounds, 1):
            loaded = _load_files(server, url, tensor, engines[name])
            values = outcome.values.setdefault(name, {})
            for metric, value in loaded.items() if turn >= 0 else ():  # it imported the driver
                values.setdefault(metric, []).append(value)
    return outcome


def _load_files(
    server: ObjectServer, url: str, tensor: torch.Tensor, engine: str
) -> dict[str, float]:
    """Return what it costs to load a tensor, a row of which is in each file."""
    into, first = torch.zeros_like(tensor), list[float]()
    server.count()
    start = time.perf_counter()
    checkpoint.load(
        {"w": into},
        url,
        no_dist=True,
        storage_options=server.options | {"engine": engine},
        on_progress=lambda _, __: first.append(time.perf_counter() - start),
    )
    seconds, count = time.perf_counter() - start, server.count()
    if not torch.equal(into, tensor):
        raise ValueError("the tensor was loaded with other values than those saved")
    per_least = count / _least(len(tensor), tensor.nbytes)
    return {
        "seconds": seconds,
        "first_byte": first[0],
        "requests": count,
        "per_least": per_least,
    }


def _least(num_files: int, num_bytes: int) -> int:
    """Return the fewest requests: the manifest, small files, or ends and 16 MiB each time."""
    if num_bytes // num_files <= _REQUEST_BYTES:
        return 1 + num_files
    return 1 + 2 * num_files + -(-num_bytes // _FETCH_BYTES)


_WHAT = (
    "An S3 server on this machine, in processes of its own, over HTTP: ours, in memory, or what "
    "DTCKPT_BENCH_SERVER names. dtckpt by obstore where that is installed, hashing on the way; the "
    "drivers alone move as many bytes that are in memory, as many parts at a time."
)
_BARS = (
    Bar(metric="seconds", against=RAW_S3FS, limit=1 / 0.85),
    Bar(metric="seconds", against=RAW_OBSTORE, limit=1 / 0.85),
    Bar(metric="seconds", against=DCP, limit=0.5),
    Bar(metric="extra_bytes", limit=_BUDGET_BYTES),
)


def _row(name: str, title: str, *, is_load: bool) -> Row:
    return Row(
        name=name,
        title=title,
        what=_WHAT,
        columns=COSTS,
        bars=_BARS,
        systems=SYSTEMS,
        run=partial(_run, is_load=is_load),
    )


REMOTE_SAVE = _row("remote-save", "Save to an object store", is_load=False)
REMOTE_LOAD = _row("remote-load", "Load from an object store", is_load=True)

REMOTE_REQUESTS = Row(
    name="remote-requests",
    title="Load of very many files from an object store",
    what="One process, from a server that answers after 20 ms. The fewest requests are "
    "one for the manifest and one for each file of up to 1 MiB, or two and one for every 16 MiB.",
    columns=(
        Column(metric="first_byte", heading="first byte"),
        Column(metric="seconds", heading="time"),
        Column(metric="requests", heading="requests", kind="count"),
        Column(metric="per_least", heading="requests / fewest", kind="ratio"),
    ),
    bars=(Bar(metric="first_byte", limit=1.0), Bar(metric="per_least", limit=1.5)),
    systems=(OURS, OURS_S3FS),
    run=_run_requests,
    ranks=lambda _: 1,
)
