"""The sweep over operators: right ones pass, and everything that can go wrong is noticed."""

# pyright: reportUnknownLambdaType=false
# Operators are made up in one line.

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from dtckpt.dtensor import DTensor, Replicate, Shard, register_sharding
from dtckpt.dtensor.ops.engine.table import RULES
from dtckpt.errors import PlacementError

from .__main__ import main
from .choices import choices_of
from .database import samples_of
from .outcome import OpResult
from .page import page
from .summary import is_unsafe, summary_of
from .team import Team
from .trial import Setting, try_operator
from .workers import try_all

QUICK = Setting(meshes=((4,),), samples=1, seconds=20)
IMPATIENT = 1.0
"""Seconds that a rank waits in tests of ranks that wait in vain."""


@dataclass
class Info:
    """An operator of a database of our own."""

    run: Callable[..., Any]
    name: str = "made_up"
    inplace_variant: Any = None
    supports_out: bool = False
    supports_autograd: bool = True
    shapes: tuple[tuple[int, ...], ...] = ((5, 3),)
    dtypes: set[torch.dtype] = field(default_factory=lambda: {torch.float32})

    def supported_dtypes(self, _device: str) -> set[torch.dtype]:
        return self.dtypes

    def sample_inputs(self, _device: str, dtype: torch.dtype, *, requires_grad: bool) -> Any:
        first, *others = [
            torch.rand(shape).to(dtype).requires_grad_(requires_grad) for shape in self.shapes
        ]
        yield SimpleNamespace(
            input=first, args=tuple(others), kwargs={}, output_process_fn_grad=None
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@cache
def team(seconds: float) -> Team:
    return Team((4,), seconds)


@pytest.fixture(scope="module", autouse=True)
def teams() -> Generator[None]:
    yield
    team.cache_clear()


def tried(info: Info, seconds: float = QUICK.seconds) -> OpResult:
    return try_operator(info.name, info, "even", QUICK, {(4,): team(seconds)})


@contextmanager
def rule(op: Any, made: Callable[..., Any]) -> Generator[None]:
    before = RULES.get(op)
    register_sharding(op)(made)
    try:
        yield
    finally:
        RULES.pop(op) if before is None else RULES.update({op: before})


def test_a_right_operator_runs_by_its_rule() -> None:
    result = tried(Info(lambda a, b: torch.mm(a, b), shapes=((5, 3), (3, 6))))
    assert result.counts == {"right": 9}
    assert (result.runs, result.gathered, result.worst) == ("rule", (), "right")
    assert result.compared == ("values",)


@torch.library.custom_op("dtckpt_coverage::unruled", mutates_args=())
def _unruled(a: Tensor) -> Tensor:
    return a.flip(0)


def test_operators_without_a_rule_are_told_by_how_they_run() -> None:
    gathered = tried(Info(_unruled, supports_autograd=False))
    assert gathered.worst == "right"
    assert gathered.runs == "fallback"
    assert gathered.gathered == ("dtckpt_coverage.unruled",)


def test_a_wrong_rule_is_noticed() -> None:
    def follow(_: Any, *__: Any) -> Any:  # every shard is scanned from its own start
        return [([Shard(0)], [Shard(0), None])]

    info = Info(lambda a: a.logcumsumexp(0), supports_autograd=False)
    assert tried(info).worst == "right"
    with rule(torch.ops.aten.logcumsumexp.default, follow):
        result = tried(info)
    assert result.worst == "wrong"
    assert is_unsafe(result)
    assert not result.returns_right
    assert "elements differ" in result.examples["wrong"].text
    assert "mesh 4, sample 0 [5, 3]" in result.examples["wrong"].case


class Doubled(torch.autograd.Function):
    """A square with a gradient that is too large where the tensor is sharded."""

    @staticmethod
    def forward(ctx: Any, a: Any) -> Any:
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (a,) = ctx.saved_tensors
        sharded = isinstance(a, DTensor) and a.placements != (Replicate(),)
        return grads[0] * a * (4 if sharded else 2)


def test_wrong_gradients_are_noticed() -> None:
    result = tried(Info(Doubled.apply))
    assert result.counts == {"right": 1, "wrong": 2}
    assert result.examples["wrong"].text.startswith("gradient 0")


def test_a_wrong_value_on_one_rank_is_noticed() -> None:
    def run(a: Any) -> Any:
        if isinstance(a, DTensor) and a.device_mesh.get_rank() == 3:
            a.to_local().add_(1)
        return a * 1

    result = tried(Info(run, shapes=((8,),), supports_autograd=False))
    assert result.counts == {"wrong": 2}


def test_wrong_shapes_dtypes_and_kinds_are_noticed() -> None:
    def other(change: Callable[[Any], Any], kind: str = "wrong") -> str:
        def run(a: Any) -> Any:
            return change(a) if isinstance(a, DTensor) else a + 1

        return tried(Info(run, supports_autograd=False)).examples[kind].text

    assert "expected torch.float32[5, 3]" in other(lambda a: (a + 1).double())
    assert "expected torch.float32[5, 3]" in other(lambda a: (a + 1)[:4])
    assert "a Tensor, expected a DTensor" in other(lambda a: a.full_tensor())
    assert "PlainResult: a plain" in other(lambda a: (a + 1).full_tensor(), "error")
    assert other(lambda a: [a + 1, a]) == "2 results, expected 1"


def test_a_local_part_of_a_wrong_shape_is_noticed() -> None:
    def run(a: Any) -> Any:
        if isinstance(a, DTensor) and a.device_mesh.get_rank() == 3:
            a = DTensor(torch.ones(1), a._spec)  # pyright: ignore[reportPrivateUsage]
        return a if isinstance(a, DTensor) else a.clone()

    result = tried(Info(run, shapes=((8,),), supports_autograd=False))
    assert result.counts == {"wrong": 2}
    assert "local torch.float32[1], expected torch.float32[8]" in result.examples["wrong"].text


def test_a_wrong_in_place_form_is_noticed() -> None:
    def add(a: Tensor) -> Tensor:
        return a + 1 if isinstance(a, DTensor) else a.add_(1)

    result = tried(Info(lambda a: a + 1, inplace_variant=add))
    assert result.counts == {"right": 3, "wrong": 3}
    assert result.examples["wrong"].case.endswith("in place")


def test_a_wrong_form_with_out_is_noticed() -> None:
    def add(a: Tensor, out: Tensor | None = None) -> Tensor:
        return a + 1 if isinstance(a, DTensor) else torch.add(a, 1, out=out)

    assert tried(Info(lambda a, **out: torch.add(a, 1, **out), supports_out=True)).counts == {
        "right": 6
    }
    result = tried(Info(add, supports_out=True))
    assert result.counts == {"right": 3, "wrong": 3}
    assert result.returns_right
    assert result.examples["wrong"].case.endswith("with out=")


def test_an_out_that_torch_forgets_is_not_ours_to_write() -> None:
    def forgetful(a: Tensor, out: Tensor | None = None) -> Tensor:
        return a + 1

    result = tried(Info(forgetful, supports_out=True))
    assert result.counts == {"right": 3}
    assert "forgets" in "".join(result.compared)


def _on_rank_0(act: Callable[[], None]) -> Callable[..., Any]:
    def run(a: Any) -> Any:
        if isinstance(a, DTensor):
            if a.device_mesh.get_rank() == 0:
                act()
            else:
                a.redistribute(placements=[Replicate()])
        return a + 1

    return run


def test_an_error_of_one_rank_is_told_from_a_common_one() -> None:
    def fail() -> None:
        raise PlacementError("rank 0 does not like this")

    info = Info(_on_rank_0(fail), shapes=((8,),), supports_autograd=False)
    result = tried(info, IMPATIENT)
    assert result.worst == "divergent"
    assert "rank 0: refused: PlacementError" in result.examples["divergent"].text


def test_an_error_of_all_ranks_is_a_refusal_or_an_error() -> None:
    def raising(error: Callable[[Any], Exception]) -> str:
        def run(a: Any) -> Any:
            if isinstance(a, DTensor):
                raise error(a)
            return a + 1

        return tried(Info(run)).worst

    assert raising(lambda _: PlacementError("no")) == "refused"
    assert raising(lambda _: RuntimeError("no")) == "error"
    assert raising(lambda a: PlacementError(str(a.device_mesh.get_rank()))) == "divergent"


def test_a_hang_is_noticed_and_the_rest_goes_on() -> None:
    hangs: list[int] = []

    def wait(a: Any) -> Any:
        if isinstance(a, DTensor) and a.placements == (Shard(0),):
            if a.device_mesh.get_rank() == 0:
                hangs.append(1)
                # What it would issue next could meet the exchange of the others, with other sizes,
                # for which Gloo ends the process.
                time.sleep(2 * IMPATIENT)
            else:
                a.redistribute(placements=[Replicate()])
        return a + 1

    info = Info(wait, shapes=((8, 4),), supports_autograd=False)
    result = tried(info, IMPATIENT)
    assert result.worst == "hang"
    assert result.counts == {"right": 2, "hang": 1}
    assert len(hangs) == 1


def test_what_cannot_be_compared_says_why() -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("not here")

    assert "RuntimeError: not here" in tried(Info(fails)).untestable
    assert tried(Info(lambda a: a.to_sparse())).untestable == "sparse result"
    assert "samples" in tried(Info(torch.neg, dtypes={torch.float16})).untestable


def test_random_and_uninitialised_results_are_compared_as_far_as_they_go() -> None:
    def noise(a: Any) -> Any:
        return a + a.new_zeros(a.shape).uniform_()

    def of_ranks(a: Any) -> Any:
        if isinstance(a, DTensor) and a.placements == (Replicate(),):
            a.to_local().add_(a.device_mesh.get_rank())
        return noise(a)

    def of_layouts(a: Any) -> Any:
        return noise(a + 1 if isinstance(a, DTensor) and a.placements == (Shard(1),) else a)

    assert tried(Info(noise)).counts == {"right": 3}
    assert "random numbers" in tried(Info(noise)).compared[0]
    unequal = tried(Info(of_ranks, supports_autograd=False))
    assert "replicas differ" in unequal.examples["wrong"].text
    found = tried(Info(of_layouts))
    assert found.counts == {"right": 2, "wrong": 1}
    assert "depends on placements: 15 of 15 elements" in found.examples["wrong"].text
    empty = tried(Info(lambda a: torch.empty_like(a), name="empty_like"))
    assert empty.compared == ("uninitialised memory: shape and dtype",)


def test_samples_are_the_first_ones_and_others_from_all_over() -> None:
    class Many(Info):
        def sample_inputs(self, *_: Any, **__: Any) -> Any:
            for size in range(1, 13):
                yield SimpleNamespace(
                    input=torch.rand(size), args=(), kwargs={}, output_process_fn_grad=None
                )
            raise IndexError("no more with these sizes")

    chosen = samples_of(Many(torch.neg), 5)
    assert [len(sample.tensors[0]) for sample in chosen] == [1, 2, 3, 7, 12]
    again = samples_of(Many(torch.neg), 5)
    assert all(torch.equal(a.args[0], b.args[0]) for a, b in zip(chosen, again, strict=True))


def test_choices_are_all_or_regular_ones_and_the_same_every_time() -> None:
    assert len(choices_of([2, 1], 1, 64, 0)) == 6
    many = choices_of([3, 3, 3, 3], 1, 40, 0)
    assert len(set(many)) == 40
    assert many == choices_of([3, 3, 3, 3], 1, 40, 0)
    assert many[0] == ((Replicate(),),) * 4
    assert ((Shard(2),),) * 4 in many
    assert len(set(choices_of([2, 2], 2, 10, 1))) == 10


def _database(_sizes: str) -> Mapping[str, Any]:
    def die(a: Any) -> Any:
        os._exit(3)
        return a

    return {"neg": Info(torch.neg, "neg"), "die": Info(die, "die")}


def test_a_process_that_dies_costs_one_operator() -> None:
    tasks = [("even", "die"), ("even", "neg")]
    results = {result.name: result for result in try_all(tasks, QUICK, 1, _database)}
    assert results["die"].worst == "crash"
    assert "status 3" in results["die"].examples["crash"].text
    assert results["neg"].worst == "right"


def test_the_page_counts_and_lists() -> None:
    results = [
        OpResult(name="a", sizes="even", counts={"right": 3}, runs="rule", compared=("values",)),
        OpResult(name="b", sizes="even", untestable="sparse result"),
        tried(Info(_raising)),
    ]
    found = summary_of(results, "even")
    assert (found.total, found.testable, found.right, found.share) == (3, 2, 1, 0.5)
    text = page(results, Setting(sizes=("even",)))
    assert "--samples 5 --choices 64" in " ".join(text.split())
    assert "| **entirely right** | **1** (50.0 %) |" in text
    assert "| `made_up` | even | 0 of 3 | refused: PlacementError: it \\| is not (mesh 4" in text
    assert "| the same without forms that write in place or to `out=` | 1 (50.0 %) |" in text
    assert "| sparse result | `b` |" in text
    assert "**Run by sharding rules and our own decompositions** (1): `a`." in text


def _raising(a: Any) -> Any:
    if isinstance(a, DTensor):
        raise PlacementError("it | is not")
    return a + 1


def test_the_command_tries_operators_of_torch(tmp_path: Path) -> None:
    lines, document = tmp_path / "results.jsonl", tmp_path / "page.md"
    options = "--ops nn.functional.relu,mm,nonzero,zeros --sizes uneven --mesh 2x2 --samples 2"
    files = ["--jobs", "1", "--json", str(lines), "--write", str(document)]
    ran = CliRunner().invoke(main, [*options.split(), *files])
    assert ran.exit_code == 0, ran.output
    assert "uneven sizes: 3 of 3 testable operators entirely right (100.0 %;" in ran.output
    results = [OpResult.from_json(json.loads(line)) for line in lines.read_text().splitlines()]
    assert {r.name: r.untestable for r in results}["zeros"] == "no tensor among the arguments"
    assert "# Operators" in document.read_text()


def test_the_command_refuses_unknown_operators() -> None:
    ran = CliRunner().invoke(main, ["--ops", "no_such_operator"])
    assert ran.exit_code == 2
    assert "no_such_operator" in ran.output
