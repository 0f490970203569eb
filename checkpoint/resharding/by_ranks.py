"""A checkpoint rewritten by the ranks of a job, each of which writes its share of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dtckpt.errors import LayoutMismatch

from ..files.manifest import FileRecord, Manifest
from ..formats.opening import ManifestText
from ..ranks.failing import CalledOff
from ..ranks.together import DEFAULT_TIMEOUT, Answers, Ranks, closing, ranks_of, together
from ..reading.batches import counted
from .work import Order, Work
from .workers import num_processes, write_with


def reshard_together(
    order: Order,
    process_group: Any,
    timeout: timedelta | None,
    processes: int | None,
    memory_bytes: int,
    on_progress: Callable[[int, int], None] | None,
) -> Manifest:
    """Do what ``reshard`` says on all ranks of a group; all get the manifest."""
    ranks = ranks_of(
        process_group,
        timeout=timeout or DEFAULT_TIMEOUT,
        purpose="reshard",
        target=order.target,
    )
    with closing(ranks):
        job = _Reshard(ranks, order, processes or 1, memory_bytes, on_progress)
        told = together(ranks, "reshard: open", job.open, lambda _: job.tell())
        together(ranks, "reshard: plan", lambda: job.plan(told))
        text = together(ranks, "reshard: write", job.write, job.finish)
        return Manifest.from_bytes(text, job.work.new.url)


class _Reshard:
    """One reshard as this rank sees it."""

    def __init__(
        self,
        ranks: Ranks,
        order: Order,
        processes: int,
        memory_bytes: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.ranks = ranks
        self.work = Work(order)
        self.processes = processes
        self.memory_bytes = memory_bytes
        self.on_progress = on_progress

    def open(self) -> bytes:
        """Let the coordinator read the manifest."""
        if self.ranks.is_coordinator:
            self.work.begin()
        return b""

    def _given(self) -> dict[str, str]:
        """Return all that the plan follows from, by what messages call it."""
        work = self.work
        return {
            "source": work.old.url,
            "target": work.new.url,
            "options": work.order.changes.digest().hex(),
        }

    def tell(self) -> bytes:
        """Return what the coordinator was given, and what it has found."""
        order = self.work.order
        head = {"given": self._given(), "save_id": order.save_id, "replaced": order.replaced}
        return json.dumps(head).encode() + b"\n" + order.text.text

    def plan(self, told: bytes) -> bytes:
        """Plan all files, alike on all ranks."""
        head, _, text = told.partition(b"\n")
        found = json.loads(head)
        for name, mine in self._given().items():
            if found["given"][name] != mine:
                raise LayoutMismatch(
                    f"the ranks were not given the same {name}; give it to all alike"
                )
        order = self.work.order
        if not self.ranks.is_coordinator:
            self.work.order = replace(
                order,
                text=ManifestText(text),
                save_id=found["save_id"],
                replaced=found["replaced"],
            )
        self.planned = self.work.plan()
        return b""

    def write(self) -> bytes:
        """Write the files of this rank; return their records."""
        turn, count = self.ranks.all.index(self.ranks.rank), len(self.ranks.all)
        mine = self.planned.ranks[turn::count]
        progress = counted(self.on_progress, sum(map(self.planned.bytes_of, mine)))

        def on_read(num_bytes: int) -> None:
            self.ranks.tell_alive()
            if self.ranks.is_called_off():
                raise CalledOff
            progress(num_bytes)

        self.work.on_read = on_read
        order = self.work.order
        beside = num_processes(order, self.processes, self.memory_bytes, mine, 0)
        with self.work.giving_up(mine):
            if beside:
                files = write_with(beside, order, mine, on_read)
            else:
                files = list(self.work.write_all(mine))
        return json.dumps([record.to_json() for record in files]).encode()

    def finish(self, answers: Answers) -> bytes:
        """Commit what all ranks have written; runs on the coordinator."""
        told = [value for answer in answers.values() for value in json.loads(answer)]
        return self.work.finish(map(FileRecord.from_json, told)).to_bytes()
