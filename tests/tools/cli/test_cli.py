from __future__ import annotations

import importlib.metadata
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import dtckpt
from dtckpt.errors import StorageError
from dtckpt.tools.cli import main
from dtckpt.tools.cli.common.options import parse_options
from dtckpt.tools.cli.common.valuetext import value_text
from dtckpt.tools.cli.look import inspect

from .conftest import Run

_RUN = "import sys; from dtckpt.tools.cli import main; main(sys.argv[1:], standalone_mode=False)"


def process(*args: object, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, and then some code."""
    command = [sys.executable, "-c", f"{_RUN}\n{after}", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_tells_commands_and_exit_codes(run: Run, flag: str) -> None:
    result = run(flag)
    assert result.exit_code == 0
    for word in ("inspect", "verify", "reshard", "Exit codes"):
        assert word in result.stdout
    for command in ("inspect", "verify", "reshard"):
        assert run(command, flag).exit_code == 0


def test_version(run: Run) -> None:
    assert run("--version").stdout.startswith("dtckpt 0.")


def test_grammar_of_rules_is_documented(run: Run) -> None:
    text = run("reshard", "-h").stdout
    for form in ("S(dim)", "S(dim)@order", "Ragged(dim:n,n)", "R  ", "PATTERN=PLACEMENT"):
        assert form in text


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        (("--help",), ("torch", "numpy", "rich", "fsspec", "dtckpt.checkpoint.files.manifest")),
        (("inspect",), ("torch", "numpy", "fsspec")),
        (("inspect", "--json"), ("torch", "numpy", "fsspec", "rich")),
        (("inspect", "--tensor", "model/scale"), ("torch", "fsspec")),
        (("inspect", "--layout"), ("torch", "numpy", "fsspec")),
        (("cat", "step"), ("torch", "numpy", "fsspec", "rich")),
        (("cat", "model/scale"), ("torch", "fsspec", "rich")),
        (("verify",), ("torch", "fsspec", "rich")),
    ],
)
def test_imports_only_what_is_needed(
    saved: Path, command: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    place = () if command == ("--help",) else (saved / "step-100",)
    show = f"print(sorted({{*{unwanted!r}}} & set(sys.modules)), file=sys.stderr)"
    done = process(command[0], *place, *command[1:], after=show)
    assert done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_nothing_there(run: Run, tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "nowhere")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith(f"Error: {tmp_path}/nowhere: no committed checkpoint here")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("order", [("--debug", "inspect"), ("inspect", "--debug")])
def test_debug_shows_the_traceback(run: Run, tmp_path: Path, order: tuple[str, ...]) -> None:
    result = run(*order, tmp_path)
    assert result.exit_code == 3
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (StorageError(13, "cannot read x: Permission denied"), 3, "Error: cannot read x: Perm"),
        (PermissionError(13, "Permission denied"), 3, "Error: Permission denied"),
        (StorageError("no\x1b]0;title\x07\nhint"), 3, "Error: no\\x1b]0;title\\x07\nhint\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted"),
        (ZeroDivisionError("oops"), 70, "Error: unexpected ZeroDivisionError: oops"),
    ],
)
def test_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_args: object, **_kwargs: object) -> Any:
        raise error

    monkeypatch.setattr(inspect, "store_at", fail)
    result = run("inspect", "anywhere")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(text)


@pytest.mark.parametrize(
    ("args", "where"),
    [
        (("s3://bucket/x?y=1",), "'CHECKPOINT'"),
        (("file://host/x",), "'CHECKPOINT'"),
        (("here", "--option", "anon=true"), "'--option'"),
        (("here", "--option", "anon"), "'--option'"),
    ],
)
def test_bad_places_are_usage_errors(run: Run, args: tuple[str, ...], where: str) -> None:
    result = run("inspect", *args)
    assert result.exit_code == 2
    assert f"Invalid value for {where}" in result.stderr


def test_unknown_driver(run: Run) -> None:
    assert run("inspect", "nosuch://x/y").exit_code == 3


def test_options_nest_and_are_json_or_text() -> None:
    items = [
        "anon=true",
        "client_kwargs.endpoint_url=http://127.0.0.1:5555/?a=b",
        "client_kwargs.verify=false",
        'key="123"',
        "limit=NaN",
        'config={"a": [1]}',
        "empty=",
    ]
    assert parse_options(items) == {
        "anon": True,
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:5555/?a=b", "verify": False},
        "key": "123",
        "limit": "NaN",
        "config": {"a": [1]},
        "empty": "",
    }


@pytest.mark.parametrize("items", [["a"], ["=1"], ["a..b=1"], ["a=1", "a.b=2"], ["a=1", "a=2"]])
def test_options_that_make_no_sense(items: list[str]) -> None:
    with pytest.raises(click.BadParameter):
        parse_options(items)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (None, "None"),
        ("it's", '"it\'s"'),
        ({"float": "-inf"}, "-inf"),
        ({"complex": [1.0, {"float": "nan"}]}, "complex(1.0, nan)"),
        ({"bytes": "YWJj"}, "3 bytes"),
        ({"bytes": 3}, '{"bytes": 3}'),
        ({"numpy": ["<f4", "AAAAAA=="]}, "numpy scalar <f4"),
        ({"device": "cuda:0"}, "device 'cuda:0'"),
        ({"size": [2, 3]}, "torch.Size([2, 3])"),
        ({"enum": ["lib.Color", "RED"]}, "Color.RED"),
        ({"pickle": "YWJj"}, "pickled, 3 bytes"),
        ({"tuple": [1]}, "(1,)"),
        ({"tuple": []}, "()"),
        ({"list": list(range(9))}, "[0, 1, 2, ... 9 items]"),
        ({"unheard": {"of": 1}}, '{"unheard": {"of": 1}}'),
        ("y" * 99, "'" + "y" * 46 + "..."),
    ],
)
def test_value_texts(node: Any, text: str) -> None:
    assert value_text(node) == text


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_progress_only_on_a_terminal(saved: Path, on_a_terminal: bool) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _RUN, "verify", str(saved / "step-100")]
    env = os.environ | {"TERM": "xterm"}
    stderr = theirs if on_a_terminal else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=env, check=True)
    os.close(theirs)
    told = b"" if on_a_terminal else done.stderr
    with suppress(OSError):  # the end of what the terminal has to tell
        while on_a_terminal:
            told += os.read(ours, 1 << 16)
    os.close(ours)
    assert (b"verifying" in told) == on_a_terminal
    assert b"\x1b" not in done.stdout
    assert b"intact" in done.stdout


def test_a_reader_that_leaves_is_no_damage(saved: Path) -> None:
    script = "from dtckpt.tools.cli import main; main()"
    for options in ((), ("--json",)):
        command = [sys.executable, "-c", script, "inspect", str(saved / "step-100"), *options]
        ours, theirs = os.pipe()
        os.close(ours)
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
        os.close(theirs)
        assert done.stderr == b""
        assert done.returncode == 141


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "dtckpt", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"dtckpt {dtckpt.__version__}\n"


def test_shells_complete_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README says: the shell asks the command by a variable of its environment."""
    shell = {"_DTCKPT_COMPLETE": "bash_complete", "COMP_WORDS": "dtckpt in", "COMP_CWORD": "1"}
    for key, value in shell.items():
        monkeypatch.setenv(key, value)
    result = CliRunner().invoke(main, prog_name="dtckpt")
    assert result.output == "plain,inspect\n"


def test_files_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert dtckpt.__version__ == "0+unknown"
