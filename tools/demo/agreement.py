"""How closely the run that was killed and resumed agrees with the uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.padding import Padding
from rich.table import Table

import dtckpt.checkpoint as ck

from .checks import largest_difference, relative_differences
from .launch import Outcome
from .setting import KILL_STEP, NEWEST, SAVES, STEPS, Setting

TOLERANCE = 2e-6
"""Largest relative difference of losses: 17 times the spacing of float32 numbers."""
PARAMETER_TOLERANCE = 2e-5
"""Largest absolute difference of final parameters."""
WHY = (
    "Why only nearly, after the resume: another mesh adds the same float32 numbers in another "
    "order, so the last bits are rounded differently, and every step builds on that. Saving and "
    "loading have no part in it: stage 4 compared every bit."
)


def compare(demo: Setting, reference: Outcome, killed: Outcome, resumed: Outcome) -> None:
    """Compare the losses of all steps, and the final parameters."""
    expected, before, after = reference.losses(), killed.losses(), resumed.losses()
    demo.console.print(_table(expected, before, after))
    last = max(before, default=KILL_STEP)  # steps were made during the save of KILL_STEP, too
    _check_losses(demo, "before the kill, on the same mesh", expected, before, (1, last))
    _check_losses(demo, "after the resume, on another mesh", expected, after, (NEWEST + 1, STEPS))
    name = f"step-{STEPS}"
    with ck.open(demo.reference / name) as one, ck.open(demo.run / name) as other:
        largest = largest_difference(one, other, "model/")
    demo.claims.check(
        f"no final parameter differs by more than {PARAMETER_TOLERANCE:g}",
        largest <= PARAMETER_TOLERANCE,
        f"largest difference: {largest:.1e}",
    )
    demo.console.print(Padding(WHY, (0, 0, 0, 2), style="dim"))


def _check_losses(
    demo: Setting,
    when: str,
    expected: Mapping[int, float],
    found: Mapping[int, float],
    wanted: tuple[int, int],
) -> None:
    first, last = wanted
    steps = range(first, last + 1)
    complete = list(found) == list(steps)
    common = [step for step in steps if step in found and step in expected]
    differences = _differences(expected, found, common)
    largest = max(differences, default=float("inf"))
    demo.claims.check(
        f"losses of steps {first} to {last}, {when}, agree to {TOLERANCE:g} relative",
        complete and largest <= TOLERANCE,
        "equal in every bit" if largest == 0 else f"largest difference: {largest:.1e}",
    )


def _differences(
    expected: Mapping[int, float], found: Mapping[int, float], steps: Sequence[int]
) -> list[float]:
    return relative_differences([expected[s] for s in steps], [found[s] for s in steps])


def _table(
    expected: Mapping[int, float], before: Mapping[int, float], after: Mapping[int, float]
) -> Table:
    """Return the losses side by side, at the steps that matter."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2))
    for title in ("step", "uninterrupted", "killed (4 ranks)", "resumed (2 ranks)", "difference"):
        table.add_column(title, justify="right")
    for step in sorted({1, *SAVES, NEWEST + 1, KILL_STEP + 1}):
        newest = after.get(step, before.get(step))
        relative = (
            "" if newest is None else f"{_differences(expected, {step: newest}, [step])[0]:.1e}"
        )
        cells = [f"{losses[step]:.7f}" if step in losses else "" for losses in (before, after)]
        table.add_row(str(step), f"{expected[step]:.7f}", *cells, relative)
    return table
