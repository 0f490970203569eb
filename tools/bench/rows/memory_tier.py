"""Saves into the memory of agents and loads from it, beside a copy of as many bytes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtckpt import checkpoint
from dtckpt.storage import open_store, start_agent, stop_agent

from ..folders import fresh, warm
from ..frame.contest import Contestant, compete
from ..frame.row import OURS, Bar, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..state import ShardedState
from ..systems import sharded_state
from .contestants import COSTS

_TWO, _OTHER, _DISK, _MEMCPY = "dtckpt, two hosts", "dtckpt, other host", "dtckpt, disk", "memcpy"
_HOSTS = ("a", "b")
_NAME = "step-1"


class _Tier:
    """Agents of two hosts, both on this machine: they reach each other by TCP over loopback."""

    def __init__(self, team: Team, job: str, budget_bytes: int) -> None:
        self.team = team
        self.job = job
        self.disk = team.folder / f"disk of {job}"
        self._registry = team.folder / "registry"
        if team.rank == 0:
            for host in _HOSTS:
                start_agent(
                    job, budget_bytes=budget_bytes, address="127.0.0.1", **self.options(host)
                )
        team.barrier()

    def options(self, host: str) -> dict[str, Any]:
        return {"host": host, "registry": str(self._registry)}

    def close(self) -> None:
        self.team.barrier()
        if self.team.rank == 0:
            for host in _HOSTS:
                stop_agent(self.job, **self.options(host))

    def clear(self) -> None:
        """Let agents forget what they hold."""
        if self.team.rank == 0:
            with open_store(f"peers://{self.job}", **self.options("a")) as store:
                store.delete([info.name for info in store.list()])
        self.team.barrier()

    def save(self, state: ShardedState, copies: int) -> Callable[[], object]:
        options = self.options("a") | {"copies": copies}
        return lambda: checkpoint.save(
            state.tensors,
            f"peers://{self.job}/{_NAME}",
            process_group=state.group,
            storage_options=options,
        )

    def load(self, state: ShardedState, host: str) -> Callable[[], object]:
        return lambda: checkpoint.load(
            state.tensors,
            f"peers://{self.job}/{_NAME}",
            process_group=state.group,
            storage_options=self.options(host),
        )

    def save_to_disk(self, state: ShardedState) -> None:
        options = {"direct_io": False}
        checkpoint.save(
            state.tensors, self.disk, process_group=state.group, storage_options=options
        )


@contextmanager
def _tier(team: Team, state: ShardedState) -> Generator[_Tier]:
    job = team.gather(f"bench-{uuid.uuid4().hex[:8]}")[0]
    tier = _Tier(team, job, 3 * state.global_bytes + (64 << 20))
    try:
        yield tier
    finally:
        tier.close()


def _memcpy(state: ShardedState, *, into_state: bool) -> Contestant:
    others = [tensor.clone() for tensor in state.locals.values()]
    own = list(state.locals.values())
    targets, sources = (own, others) if into_state else (others, own)

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return Contestant(name=_MEMCPY, call=copy)


def _compete(
    team: Team, setting: Setting, state: ShardedState, contestants: Sequence[Contestant]
) -> Outcome:
    outcome = compete(team, contestants, setting.rounds)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _run_save(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    with _tier(team, state) as tier:

        def without_disk() -> None:
            fresh(team, Path(tier.disk))

        contestants = [
            Contestant(name=OURS, before=tier.clear, call=tier.save(state, 1)),
            Contestant(name=_TWO, before=tier.clear, call=tier.save(state, 2)),
            Contestant(name=_DISK, before=without_disk, call=lambda: tier.save_to_disk(state)),
            _memcpy(state, into_state=False),
        ]
        return _compete(team, setting, state, contestants)


def _run_load(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    with _tier(team, state) as tier:
        tier.save(state, 1)()
        tier.save_to_disk(state)

        def from_disk() -> None:
            checkpoint.load(state.tensors, tier.disk, process_group=state.group)

        def before() -> None:
            state.clear()
            warm(team, tier.disk)

        contestants = [
            Contestant(name=name, before=before, call=call, after=state.check)
            for name, call in (
                (OURS, tier.load(state, "a")),
                (_OTHER, tier.load(state, "elsewhere")),
                (_DISK, from_disk),
            )
        ]
        return _compete(team, setting, state, [*contestants, _memcpy(state, into_state=True)])


PEERS_SAVE = Row(
    name="peers-save",
    title="Save into the memory of agents",
    what="All ranks are of one host. Ours: its agent alone holds the state; two hosts: another "
    "agent on this machine, over TCP, holds it too before the save ends. The disk: a save through "
    "the page cache, until all is synced. memcpy: into memory that is there.",
    columns=COSTS,
    bars=(Bar(metric="seconds", against=_DISK, limit=1.0),),
    systems=(OURS, _TWO, _DISK, _MEMCPY),
    run=_run_save,
)
PEERS_LOAD = Row(
    name="peers-load",
    title="Load from the memory of agents",
    what="Into the tensors that are there, every byte verified. Ours: from the agent of the ranks' "
    "own host; other host: over TCP, on this machine; the disk: all files in the page cache.",
    columns=COSTS,
    bars=(Bar(metric="seconds", against=_MEMCPY, limit=2.0),),
    systems=(OURS, _OTHER, _DISK, _MEMCPY),
    run=_run_load,
)
