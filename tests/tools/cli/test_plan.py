from __future__ import annotations

from pathlib import Path

from .conftest import Run, document

ARGS = ("--mesh", "dp=256,tp=2", "--placements", "*embed.weight=R,S(1)")


def test_alike_ranks_are_one_line(run: Run, checkpoint: Path) -> None:
    result = run("plan", checkpoint, *ARGS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "512 ranks" in result.stdout
    assert "slowest" in result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) < 12
    assert max(map(len, lines[1:])) <= 80  # the first has the path


def test_json_has_every_rank(run: Run, checkpoint: Path) -> None:
    told = document(run("plan", checkpoint, *ARGS, "--json"))
    assert (told["kind"], told["mesh"]) == ("plan", "dp=256,tp=2")
    ranks = [rank for cost in told["ranks"] for rank in cost["ranks"]]
    assert sorted(ranks) == list(range(512))
    assert told["read_bytes"] == sum(c["read_bytes"] * len(c["ranks"]) for c in told["ranks"])


def test_rules_that_fit_nothing(run: Run, checkpoint: Path) -> None:
    assert run("plan", checkpoint, "--mesh", "dp=2", "--placements", "none=R").exit_code == 3
    wrong = run("plan", checkpoint, "--mesh", "dp=2", "--placements", "*=R,R")
    assert wrong.exit_code == 2
