"""``make demo-parallel``: dtckpt's own parallelisms train, die, and go on in another form."""

from __future__ import annotations

import sys
from pathlib import Path

from ..demo.setting import Plan, Ranks
from ..demo.stages import run_demo

PLAN = Plan(
    worker="tools.demo_parallel.worker",
    uninterrupted=Ranks(count=1, mesh="", by="PyTorch alone"),
    killed=Ranks(
        count=8,
        mesh="dp=2,cp=2,tp=2",
        by="FSDP x context x tensor parallel, with sequence and loss parallel",
    ),
    resumed=Ranks(count=3, mesh="dp=3", by="FSDP alone"),
    steps=24,
    save_every=6,
    kill_step=18,
    kill_rank=2,
    parameter_tolerance=1e-3,
)


def main() -> int:
    """Run the demo and return its exit code."""
    return run_demo(Path("demo-output-parallel"), PLAN)


if __name__ == "__main__":
    sys.exit(main())
