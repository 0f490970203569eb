"""``kill -9`` while a checkpoint is on its way to the root."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ...python import ROOT


def test_a_killed_promotion_leaves_nothing_half_and_the_run_goes_on() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.manager.killed_promotions", "3"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    cases = [json.loads(line) for line in ran.stdout.splitlines()]
    assert sum(case["killed"] for case in cases) >= len(cases) - 2
    for case in cases:
        assert case["whole"], case
        assert case["restored"] >= max(case["root"], default=0), case
        assert case["saved"] == 3, case
        assert {case["restored"], 3} - {0} <= set(case["after"]), case
    # Killed on the way: the step was in the fast place, and was gone on from.
    ways = {(*case["root"], case["restored"]) for case in cases}
    assert ways >= {(1,), (1, 2)}
