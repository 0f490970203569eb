"""The three training runs: uninterrupted, killed in a save, resumed on another mesh."""

from __future__ import annotations

import re
from pathlib import Path

import dtckpt.checkpoint as ck
from dtckpt.errors import DtckptError, NotCommitted
from dtckpt.storage import open_store
from dtckpt.tools.cli.common.console import iec

from .launch import Outcome
from .setting import Setting
from .worker import TIMEOUT


def train_uninterrupted(demo: Setting) -> Outcome:
    """Train to the end: what the other runs are compared with."""
    outcome = demo.train("uninterrupted", demo.reference, demo.plan.uninterrupted)
    losses = list(outcome.losses().values())
    last = sum(losses[-5:]) / 5
    _check_all_committed(demo, demo.reference, "all its saves are committed")
    demo.claims.check(
        "the model learns: the mean loss of the last 5 steps is below 0.7 times the first",
        last < 0.7 * losses[0],
        f"{losses[0]:.3f} -> {last:.3f}",
    )
    return outcome


def train_until_killed(demo: Setting) -> Outcome:
    """Train again, until a rank dies in the middle of a save."""
    plan = demo.plan
    outcome = demo.train("killed", demo.run, plan.killed, is_killed=True)
    died = rf"rank +: {plan.kill_rank} .*\n *exitcode +: -9 "
    demo.claims.check(
        f"rank {plan.kill_rank} was ended by SIGKILL, and the job with it",
        outcome.exit_code != 0 and re.search(died, outcome.log) is not None,
        f"torchrun ended with {outcome.exit_code}",
    )
    _check_going_on(demo, outcome)
    _check_survivors(demo, outcome)
    _check_leftovers(demo)
    _check_not_committed(demo)
    newest = ck.latest(demo.run)
    demo.claims.check(
        f"the newest committed checkpoint is the one before, step {plan.newest}",
        newest is not None and newest.number == plan.newest,
    )
    report = ck.verify(demo.step(plan.newest))
    demo.claims.check(
        f"step {plan.newest} is intact to the last byte",
        not report.problems,
        f"{iec(report.bytes_checked)} checked",
    )
    return outcome


def train_resumed(demo: Setting) -> Outcome:
    """Go on from the newest checkpoint on fewer ranks, with another mesh."""
    plan = demo.plan
    outcome = demo.train("resumed", demo.run, plan.resumed)
    told = outcome.resumed()
    demo.claims.check(f"it resumed from step {plan.newest}", told["step"] == plan.newest)
    demo.claims.check(
        "on all ranks every tensor and value was then, bit for bit, what the checkpoint holds",
        told["tensors"] > 0 and not told["differences"],
        f"{told['tensors']} tensors of parameters and optimizer gathered and compared, and all "
        f"values; differences: {', '.join(told['differences']) or 'none'}",
    )
    demo.claims.check(
        "every sharded tensor lies on these ranks in other parts than it was saved",
        told["resharded"] == told["sharded"] > 0,
        f"{told['resharded']} tensors: on {plan.killed.mesh} before, on {plan.resumed.mesh} now",
    )
    text = f"step {plan.kill_step} was saved again in the same place; now all saves are committed"
    _check_all_committed(demo, demo.run, text)
    return outcome


def _check_all_committed(demo: Setting, root: Path, text: str) -> None:
    committed = tuple(step.number for step in ck.committed_steps(root))
    demo.claims.check(text, committed == demo.plan.saves, f"steps {', '.join(map(str, committed))}")


def _check_going_on(demo: Setting, outcome: Outcome) -> None:
    kill_step = demo.plan.kill_step
    meanwhile = [step for step in outcome.losses() if step > kill_step]
    demo.claims.check(
        f"the training went on while step {kill_step} was being saved, until the rank died",
        bool(meanwhile),
        f"steps made meanwhile: {', '.join(map(str, meanwhile)) or 'none'}",
    )


def _check_survivors(demo: Setting, outcome: Outcome) -> None:
    survivors = [rank for rank in range(demo.plan.killed.count) if rank != demo.plan.kill_rank]
    told = [error for rank, error in outcome.errors.items() if rank in survivors]
    longest = max((error["seconds"] for error in told), default=float("inf"))
    message = told[0]["message"].partition(" This is typically")[0] if told else ""
    demo.claims.check(
        f"ranks {', '.join(map(str, survivors))} did not wait for it: their handles of the save "
        f"raised RankFailed long before the timeout of {TIMEOUT.seconds} s",
        [error["error"] for error in told] == ["RankFailed"] * len(survivors)
        and longest < TIMEOUT.seconds / 2,
        f"at most {longest:.1f} s after its save began: {message}",
    )


def _check_leftovers(demo: Setting) -> None:
    plan = demo.plan
    store = open_store(demo.step(plan.kill_step))
    leftovers = [Path(store.url) / name for name in store.leftovers()]
    (whole,) = demo.step(plan.newest).glob(f"data/*/{plan.kill_rank:05}.safetensors")
    for path in leftovers:
        written = len(path.read_bytes().rstrip(b"\0"))  # the rest is reserved space
        demo.claims.check(
            "it died in the middle of a write: about half of the data file of rank "
            f"{plan.kill_rank} is there",
            whole.stem in path.name and 0.4 < written / whole.stat().st_size < 0.9,
            f"{path.name}: {iec(written)} written of {iec(whole.stat().st_size)}",
        )
    finished = [Path(info.name).stem for info in store.list()]
    others = {f"{rank:05}" for rank in range(plan.killed.count) if rank != plan.kill_rank}
    demo.claims.check(
        f"step {plan.kill_step} has no manifest: what the other ranks had finished is never read",
        len(leftovers) == 1 and set(finished) <= others,
        f"finished data files: {', '.join(finished) or 'none'}",
    )


def _check_not_committed(demo: Setting) -> None:
    error = None
    try:
        ck.load({"step": 0}, demo.step(demo.plan.kill_step))
    except DtckptError as found:
        error = found
    text = f"loading step {demo.plan.kill_step} raises NotCommitted"
    demo.claims.check(text, isinstance(error, NotCommitted), str(error or ""))
