"""The checks for machines with a GPU, run on the CPU: only the device differs."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.python import run_python
from tools.gpu import __main__ as gpu_check
from tools.gpu.__main__ import CHECKS, NOTHING_CHECKED, main
from tools.gpu.setting import Finding, Setting, differing


def test_all_of_it_runs_on_the_cpu(tmp_path: Path) -> None:
    script = ["-m", "tools.gpu", "--device", "cpu", "--json"]
    small = ["--mib", "8", "--rounds", "2", "--folder", str(tmp_path)]
    small += ["--record", str(tmp_path / "figures")]
    done = run_python(*script, *small, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["checked"]
    assert told["num_wrong"] == 0
    assert len(told["findings"]) == len(CHECKS)
    assert not any(finding["problems"] for finding in told["findings"])
    numbers = {name: n for finding in told["findings"] for name, n in finding["numbers"].items()}
    assert {"stall, GB/s", "save, GB/s", "load, GB/s"} < numbers.keys()
    assert min(numbers.values()) > 0
    (recorded,) = (tmp_path / "figures").iterdir()
    assert json.loads(recorded.read_text()) == told
    assert platform.node().lower()[:4] in recorded.name
    assert [path.name for path in tmp_path.iterdir()] == ["figures"], "what was written is gone"


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_gpu_it_says_that_nothing_was_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--json"] if as_json else []) == 0
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed) == {"checked": False, "reason": NOTHING_CHECKED}
    else:
        assert printed == f"{NOTHING_CHECKED}\n"


def test_what_is_wrong_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def wrong(_: Setting) -> Finding:
        return Finding(name="water is wet", problems=("it is dry",), numbers={"drops": 0.5})

    def broken(_: Setting) -> Finding:
        """Fire is hot."""
        raise ValueError("no fire")

    monkeypatch.setattr(gpu_check, "CHECKS", (wrong, broken))
    assert main(["--device", "cpu", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  water is wet\n         it is dry\n       drops: 0.50\n" in printed
    assert "WRONG  Fire is hot.\n         it broke off: ValueError: no fire\n" in printed
    assert "2 of 2 checks found something wrong" in printed


def test_states_are_compared_bit_for_bit() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert differing({"a": nan, "b": zero}, {"a": nan.clone(), "b": zero}) == ()
    assert differing({"b": zero}, {"b": -zero}) == ("'b' differs",)
    assert differing({"a": nan}, {"b": zero}) == ("'a' differs", "'b' differs")
