"""The training job of the demo: what every rank runs under torchrun.

It is a training script of today: torch's ``parallelize_module`` and ``fully_shard``, torch's AdamW,
and ``dtckpt.checkpoint`` to save in the background and to load.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dtckpt.checkpoint as ck
from dtckpt.errors import CheckpointError
from dtckpt.storage import FaultyStore, Store, open_store

from .checks import count_dtensors, state_by_names, state_differences
from .ending import KillHalfway, Stop
from .model import GPT, make_model, parallelize
from .text import Batch, Corpus

ROWS = 8
"""Passages in a batch, all data-parallel ranks together."""
_SEED = 7
TIMEOUT = timedelta(seconds=60)
"""After which a rank gives up on one that is silent but not gone."""
STEPS_BEFORE_THE_END = 2
"""Steps that the training makes during the save in which a rank is to die, before it does."""


@dataclass(slots=True)
class Saving:
    """A save that goes on beside the training."""

    step: int
    handle: ck.SaveHandle
    started: float
    stall: float
    """Seconds until the training could go on."""
    ended: float = 0.0


class Job:
    """Model, optimizer, schedule and data on one rank, and their checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.corpus = Corpus(Path(options.corpus).read_bytes())
        self.model = self.spread(make_model(_SEED))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.steps)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "schedule": self.schedule,
            "step": 0,
        }
        self.saving: Saving | None = None
        self.may_die = threading.Event()

    def spread(self, model: GPT) -> GPT:
        """Return a model, which all ranks have alike, spread over the mesh."""
        axes = dict(axis.split("=") for axis in self.options.mesh.split(","))
        sizes = tuple(int(size) for size in axes.values())
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
        return parallelize(model, self.mesh)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Make the passes of this rank's part of a batch and return its loss.

        The mean of the losses of all ranks is that of the batch.
        """
        mine = batch.share(self.mesh.get_local_rank("dp"), self.mesh["dp"].size())
        # Ranks of one tensor-parallel group have the same rows.
        loss = self.model(mine.inputs, mine.targets)
        loss.backward()
        return loss.detach()

    def train(self, stop: Stop) -> None:
        """Load the newest checkpoint, if there is one, and train to the last step."""
        newest = ck.latest(self.options.checkpoints, timeout=TIMEOUT)
        if newest is not None:
            self.resume(newest)
        for step in range(self.state["step"] + 1, self.options.steps + 1):
            if stop.asked or step > self.last_step_of_all():
                self.may_die.set()
            self.look_after_save(wait=stop.asked)
            stop.leave_if_asked()
            started = time.perf_counter()
            try:
                loss = self.step(step)
            except RuntimeError:  # another rank is gone in the middle of a collective
                self.may_die.set()
                self.look_after_save(wait=True)
                raise
            self.log(event="step", step=step, loss=loss, seconds=time.perf_counter() - started)
            if step % self.options.save_every == 0 or step == self.options.steps:
                self.look_after_save(wait=True)
                self.save(step)
        self.look_after_save(wait=True)

    def last_step_of_all(self) -> int:
        """Return the last step that all ranks make, the one that is to die in a save included."""
        kill_step = self.options.kill_step
        return self.options.steps if kill_step is None else kill_step + STEPS_BEFORE_THE_END

    def resume(self, newest: ck.Step) -> None:
        """Load a checkpoint and compare every leaf of the state with what lies there."""
        started = time.perf_counter()
        report = ck.load(self.state, newest.url, timeout=TIMEOUT)
        seconds = time.perf_counter() - started
        live = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in self.state.items()
        }
        live["optim"] = state_by_names(self.optimizer, self.model)
        with ck.open(newest.url) as checkpoint:
            differences = state_differences(live, checkpoint.state_dict())
            num_tensors = len(checkpoint)
        self.log(
            event="resume",
            step=newest.number,
            seconds=seconds,
            tensors=num_tensors,
            resharded=len(_of_any_rank(report.resharded)),
            sharded=count_dtensors(live),
            differences=_of_any_rank(differences),
        )

    def step(self, step: int) -> float:
        """Make one step and return the mean loss of the whole batch."""
        batch = self.corpus.batch(step, rows=ROWS, context=self.model.config.context)
        total = self.backward(batch).double()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.state["step"] = step
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def save(self, step: int) -> None:
        """Begin to save as ``step-N``; the rank that is to die takes a store that sees to it."""
        path = f"{self.options.checkpoints}/step-{step}"
        target: str | Store = path
        if (step, dist.get_rank()) == (self.options.kill_step, self.options.kill_rank):
            target = FaultyStore(open_store(path), KillHalfway(self.may_die))
        metadata = {"mesh": self.options.mesh}
        started = time.perf_counter()
        try:
            handle = ck.async_save(self.state, target, metadata=metadata, timeout=TIMEOUT)
        except CheckpointError as error:
            self.tell(error, time.perf_counter() - started)
            raise
        saving = Saving(step, handle, started, time.perf_counter() - started)
        handle.add_done_callback(lambda _: setattr(saving, "ended", time.perf_counter()))
        self.saving = saving

    def look_after_save(self, *, wait: bool) -> None:
        """Tell of a save that has ended; raise its error."""
        saving = self.saving
        if saving is None or not (wait or saving.handle.done()):
            return
        self.saving = None
        try:
            report = saving.handle.result()
        except CheckpointError as error:
            self.tell(error, time.perf_counter() - saving.started)
            raise
        self.log(
            event="save",
            step=saving.step,
            bytes=report.total_bytes,
            stall=saving.stall,
            seconds=saving.ended - saving.started,
        )

    def tell(self, error: CheckpointError, seconds: float) -> None:
        """Leave this rank's error, learnt so many seconds into a save, beside the events."""
        told = {"error": type(error).__name__, "message": str(error), "seconds": seconds}
        Path(f"{self.options.events}.rank{dist.get_rank()}").write_text(json.dumps(told))

    def log(self, **event: Any) -> None:
        """Append an event to the log, which rank 0 keeps."""
        if dist.get_rank() == 0:
            with Path(self.options.events).open("a") as file:
                file.write(json.dumps(event) + "\n")


def _of_any_rank(names: Sequence[str]) -> list[str]:
    """Return the names that at least one rank gives; all ranks call this."""
    found: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return list(dict.fromkeys(name for names in found for name in names))


def main(job: type[Job] = Job) -> None:
    """Run one rank."""
    options = _options()
    stop = Stop()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    job(options).train(stop)
    dist.barrier()
    dist.destroy_process_group()
    # Everything is on disk and the groups are gone. Threads of theirs that outlive the interpreter
    # now and then abort its regular end ("terminate called without an active exception").
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, help="directory of all steps")
    parser.add_argument("--corpus", required=True, help="text to train on")
    parser.add_argument("--events", required=True, help="file of events, one JSON line each")
    parser.add_argument("--mesh", required=True, help="for instance dp=2,tp=2, or none")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--kill-step", type=int, help="the save in which a rank is to die")
    parser.add_argument("--kill-rank", type=int, help="the rank that is to die")
    return parser.parse_args()


if __name__ == "__main__":
    main()
