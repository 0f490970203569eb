"""``make demo``: train, die in a save, resume elsewhere, and prove that nothing was lost."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from .offline import look, reshard
from .s3 import loopback_bucket, missing_packages
from .setting import Plan, Ranks, Setting
from .stages import Stages, run_demo

_FOUR = Ranks(count=4, mesh="dp=2,tp=2")
PLAN = Plan(
    worker="tools.demo.worker",
    uninterrupted=_FOUR,
    killed=_FOUR,
    resumed=Ranks(count=2, mesh="dp=2"),
    steps=36,
    save_every=6,
    kill_step=24,
    kill_rank=2,
    parameter_tolerance=2e-5,
)


def main() -> int:
    """Run the demo and return its exit code."""
    missing = missing_packages()
    if missing:
        Console().print(
            f"[red]The demo needs {', '.join(missing)}[/] for its S3 server: run it by `make demo`,"
            " or install the development dependencies (pip install --group dev)"
        )
        return 1
    return run_demo(Path("demo-output"), PLAN, _work_offline)


def _work_offline(demo: Setting, stages: Stages) -> None:
    with loopback_bucket("dtckpt-demo") as bucket:
        with stages.stage("The final checkpoint is resharded offline, on disk and into S3"):
            resharded = reshard(demo, bucket)
        with stages.stage("dtckpt inspect and dtckpt verify"):
            look(demo, bucket, resharded)


if __name__ == "__main__":
    sys.exit(main())
