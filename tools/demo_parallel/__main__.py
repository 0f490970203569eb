"""``make demo-parallel``: dtckpt's own parallelisms train, die, and go on in another form."""

from __future__ import annotations

import sys
from pathlib import Path

from ..demo.agreement import compare
from ..demo.runs import train_resumed, train_uninterrupted, train_until_killed
from ..demo.setting import Plan, Ranks, Setting
from ..demo.stages import Stages, run_demo

PLAN = Plan(
    worker="tools.demo_parallel.worker",
    uninterrupted=Ranks(count=1, mesh=""),
    killed=Ranks(count=8, mesh="dp=2,cp=2,tp=2"),
    resumed=Ranks(count=3, mesh="dp=3"),
    steps=24,
    save_every=6,
    kill_step=18,
    kill_rank=2,
    parameter_tolerance=1e-3,
)


def main() -> int:
    """Run the demo and return its exit code."""
    return run_demo(Path("demo-output-parallel"), PLAN, _demonstrate)


def _demonstrate(demo: Setting, stages: Stages) -> None:
    plan = demo.plan
    with stages.stage(f"{plan.uninterrupted} trains {plan.steps} steps, by PyTorch alone"):
        reference = train_uninterrupted(demo)
    with stages.stage(
        f"{plan.killed}: FSDP x context x tensor parallel, with sequence and loss parallel; rank "
        f"{plan.kill_rank} is killed in the middle of the save of step {plan.kill_step}"
    ):
        killed = train_until_killed(demo)
    with stages.stage(f"{plan.resumed}: FSDP alone resumes from step {plan.newest}"):
        resumed = train_resumed(demo)
    with stages.stage("The losses agree with those of one device"):
        compare(demo, reference, killed, resumed)


if __name__ == "__main__":
    sys.exit(main())
