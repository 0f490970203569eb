"""How closely the run that was killed and resumed agrees with the uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.padding import Padding
from rich.table import Table

import dtckpt.checkpoint as ck

from .checks import largest_difference, relative_differences
from .launch import Outcome
from .setting import Plan, Setting

TOLERANCE = 2e-6
"""Largest relative difference of losses: 17 times the spacing of float32 numbers."""
WHY = (
    "Why only nearly, on another mesh: it adds the same float32 numbers in another order, so the "
    "last bits are rounded differently, and every step builds on that. Saving and loading have no "
    "part in it: every bit was compared after the load."
)


def compare(demo: Setting, reference: Outcome, killed: Outcome, resumed: Outcome) -> None:
    """Compare the losses of all steps, and the final parameters."""
    plan = demo.plan
    expected, before, after = reference.losses(), killed.losses(), resumed.losses()
    demo.console.print(_table(plan, expected, before, after))
    last = max(before, default=plan.kill_step)  # steps were made during that save, too
    same = plan.killed == plan.uninterrupted
    when = f"before the kill, on {'the same mesh' if same else plan.killed.mesh}"
    _check_losses(demo, when, expected, before, (1, last))
    when = f"after the resume, on {plan.resumed.mesh}"
    _check_losses(demo, when, expected, after, (plan.newest + 1, plan.steps))
    name = f"step-{plan.steps}"
    with ck.open(demo.reference / name) as one, ck.open(demo.run / name) as other:
        largest = largest_difference(one, other, "model/")
    demo.claims.check(
        f"no final parameter differs by more than {plan.parameter_tolerance:g}",
        largest <= plan.parameter_tolerance,
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
    plan: Plan,
    expected: Mapping[int, float],
    before: Mapping[int, float],
    after: Mapping[int, float],
) -> Table:
    """Return the losses side by side, at the steps that matter."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2))
    table.add_column("loss of step", justify="right", vertical="bottom")
    for what, ranks in (
        ("uninterrupted", plan.uninterrupted),
        ("killed", plan.killed),
        ("resumed", plan.resumed),
    ):
        table.add_column(f"{what}\n{ranks.mesh or ranks}", justify="right", vertical="bottom")
    table.add_column("difference", justify="right", vertical="bottom")
    for step in sorted({1, *plan.saves, plan.newest + 1, plan.kill_step + 1}):
        newest = after.get(step, before.get(step))
        relative = (
            "" if newest is None else f"{_differences(expected, {step: newest}, [step])[0]:.1e}"
        )
        cells = [f"{losses[step]:.7f}" if step in losses else "" for losses in (before, after)]
        table.add_row(str(step), f"{expected[step]:.7f}", *cells, relative)
    return table
