"""Several tensors redistributed together: what goes between the same ranks goes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ..comm.traffic import BY_THREAD, asking
from ..comm.transports import least_agree_bytes
from ..mesh.spec import DTensorSpec
from ..torch_private import is_traced
from .memory import agree_on_memory
from .plans import MAX_PLANS, Move, RedistributePlan, plan_redistribute, recorded, without_values
from .steps import Results, Step


@dataclass(frozen=True, slots=True)
class JointPlan:
    """The plans of several tensors, step by step."""

    plans: tuple[tuple[int, RedistributePlan], ...]
    """By the place of the tensor in a list; those that do nothing are left out."""
    rounds: tuple[tuple[tuple[tuple[int, ...], tuple[Step, ...]], ...], ...]
    """For every step of the plans the tensors that go together, and the steps that they take."""
    is_small: bool
    """Whether no round can be so large that memory for it is agreed on."""

    @classmethod
    def of(cls, plans: Sequence[tuple[int, RedistributePlan]]) -> JointPlan:
        """Return the plan of tensors that are redistributed by these."""
        working = tuple((i, plan) for i, plan in plans if plan.steps)
        rounds: list[tuple[tuple[tuple[int, ...], tuple[Step, ...]], ...]] = []
        waiting = [(i, plan.steps) for i, plan in working]
        while waiting:
            together: dict[object, list[tuple[int, Step]]] = {}
            for i, (step, *_) in waiting:
                key = step.key if step.key is not None else ("local", i)
                together.setdefault(key, []).append((i, step))
            rounds.append(
                tuple(
                    (tuple(i for i, _ in members), tuple(step for _, step in members))
                    for members in together.values()
                )
            )
            waiting = [(i, steps[1:]) for i, steps in waiting if len(steps) > 1]
        most_bytes = sum(plan.most_bytes for _, plan in working)
        return cls(working, tuple(rounds), most_bytes < least_agree_bytes())

    def run(self, locals_: list[Tensor]) -> None:
        """Put what becomes of the local tensors in their places."""
        self.start(locals_)()

    def start(self, locals_: list[Tensor], *, later: bool = False) -> Callable[[], None]:
        """Run all rounds but the last and start that; the result waits, and puts what came.

        With ``later`` other collectives may come before the result is called.
        """
        if any(is_traced(locals_[i]) for i, _ in self.plans):
            self._record(locals_)
            return lambda: None
        for i, plan in self.plans:
            locals_[i] = plan.begun(locals_[i])
        for groups in self.rounds[:-1]:
            for members, steps in groups:
                self._put(locals_, members, self._started(locals_, members, steps)())
        # Each is waited for before the next one starts, unless that is wanted otherwise.
        begun: list[tuple[tuple[int, ...], Results]] = []
        for members, steps in self.rounds[-1] if self.rounds else ():
            results = self._started(locals_, members, steps, later=later)
            if later:
                begun.append((members, results))
            else:
                self._put(locals_, members, results())

        def finish() -> None:
            for members, results in begun:
                self._put(locals_, members, results())
            for i, plan in self.plans:
                locals_[i] = plan.ended(locals_[i])

        return finish

    def _record(self, locals_: list[Tensor]) -> None:
        """Have a graph that is recorded do all of it whenever it runs."""
        sent = [(i, plan) for i, plan in self.plans if not plan.is_local]
        for i, plan in self.plans:
            if plan.is_local:
                locals_[i] = plan.run(locals_[i])
        plans = [plan for _, plan in sent]

        def run(given: list[Tensor]) -> list[Tensor]:
            run_together(list(enumerate(plans)), given)
            return given

        if sent:
            made = recorded(plans, [locals_[i] for i, _ in sent], run)
            self._put(locals_, tuple(i for i, _ in sent), made)

    def _started(
        self,
        locals_: list[Tensor],
        members: tuple[int, ...],
        steps: tuple[Step, ...],
        *,
        later: bool = False,
    ) -> Results:
        given = [locals_[i] for i in members]
        if not self.is_small:
            agree_on_memory(steps, given)
        if not BY_THREAD:
            return steps[0].start_all(steps, given, later=later)
        scope = self._asking(members)
        with scope:
            results = steps[0].start_all(steps, given, later=later)

        def finish() -> list[Tensor]:
            with scope:
                return results()

        return finish

    def _asking(self, members: tuple[int, ...]) -> asking:
        """Return what the steps of some tensors are counted as: what all of them are asked for."""
        kinds = {plan.asked for i, plan in self.plans if i in members}
        return asking(kinds.pop() if len(kinds) == 1 else "")

    @staticmethod
    def _put(locals_: list[Tensor], members: tuple[int, ...], results: list[Tensor]) -> None:
        for i, result in zip(members, results, strict=True):
            locals_[i] = result


def redistribute_locals(locals_: Sequence[Tensor], moves: Sequence[Move]) -> list[Tensor]:
    """Return this rank's local tensors under the second spec of each move.

    One that every rank has as it is to be stays what it is. What goes between the same ranks goes
    in one collective. Every rank must call with the same moves in the same order.
    """
    return start_redistribute_locals(locals_, moves, later=False)()


def start_redistribute_locals(
    locals_: Sequence[Tensor], moves: Sequence[Move], *, later: bool = True
) -> Callable[[], list[Tensor]]:
    """Start a ``redistribute_locals`` and return what waits for its result.

    With ``later`` other collectives may come in between, and the result may never be called.
    """
    made = list(locals_)
    if any(local.is_meta for local in made):  # also where there is no group to make a plan with
        for i, (source, target) in enumerate(moves):
            if made[i].is_meta and not _is_nothing(source, target):
                made[i] = without_values(made[i], source, target)
        valued = [(i, move) for i, move in enumerate(moves) if not made[i].is_meta]
        plan = _joint_plan(valued)
    elif not moves:
        return lambda: made
    else:
        key = tuple(moves)
        plans = moves[0][0].mesh.cache("joint_plans", MAX_PLANS)
        plan = cast("JointPlan | None", plans.get(key))
        if plan is None:
            plan = _joint_plan(list(enumerate(moves)))
            plans.put(key, plan)
    finish = plan.start(made, later=later)

    def result() -> list[Tensor]:
        finish()
        return made

    return result


def _joint_plan(moves: Sequence[tuple[int, Move]]) -> JointPlan:
    return JointPlan.of(
        [
            (i, plan_redistribute(source, target))
            for i, (source, target) in moves
            if not _is_nothing(source, target)
        ]
    )


def _is_nothing(source: DTensorSpec, target: DTensorSpec) -> bool:
    return source is target or (source.box is None and target.box is None)


def run_together(plans: Sequence[tuple[int, RedistributePlan]], locals_: list[Tensor]) -> None:
    """Run the plans of tensors, given by their place in a list in which the results are put."""
    for i, plan in plans:
        if locals_[i].is_meta:
            locals_[i] = plan.run(locals_[i])
    JointPlan.of([(i, plan) for i, plan in plans if not locals_[i].is_meta]).run(locals_)
