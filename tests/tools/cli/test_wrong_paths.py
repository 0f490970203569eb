"""Every command says what is at a path that is none of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as ckpt

from ...conftest import S3
from .conftest import Run

COMMANDS = {
    "ls": "ls {}",
    "inspect": "inspect {}",
    "cat": "cat {}",
    "watch": "watch {} --once",
    "report": "report {} -o {out}/page.html",
    "verify": "verify {}",
    "extract": "extract {} a -o {out}/a.npy",
    "edit": "edit {} --remove-metadata loss",
    "copy": "copy {} {out}/copy",
    "convert": "convert {} {out}/converted --to dcp",
    "pin": "pin {}",
    "rm": "rm {}",
    "prune": "prune {} --keep-last 1",
    "gc": "gc {}",
}


def call(run: Run, name: str, place: object, out: Path, options: dict[str, str]) -> str:
    """Return what a command says, with storage options, of a place that is none; exit code 3."""
    words = [word.format(place, out=out) for word in COMMANDS[name].split()]
    kind = "--source-option" if name in ("copy", "convert") else "--option"
    told = [word for key, value in options.items() for word in (kind, f"{key}={value}")]
    result = run(*words, *told)
    assert result.exit_code == 3, result.output
    assert not list(out.iterdir())
    return result.stderr


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_does_not_exist(run: Run, tmp_path: Path, out: Path, name: str) -> None:
    ckpt.save({"a": torch.ones(2)}, tmp_path / "runs" / "step-1")
    assert "does not exist. Check the path" in call(run, name, tmp_path / "runz/step-9", out, {})


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bucket_that_does_not_exist(run: Run, s3: S3, out: Path, name: str) -> None:
    place = "s3://no-such-bucket-here/run/step-1"
    text = call(run, name, place, out, of_s3(s3.options["client_kwargs"]["endpoint_url"]))
    assert "the bucket does not exist: make it, or check its name" in text


@pytest.mark.parametrize("name", ["ls", "inspect", "rm", "gc", "watch", "report"])
def test_a_host_that_is_not_there(run: Run, out: Path, name: str, closed_port: int) -> None:
    options = of_s3(f"http://127.0.0.1:{closed_port}") | {"deadline": "1"}
    text = call(run, name, "s3://bucket/run/step-1", out, options)
    assert "check the endpoint, and the network" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_no_driver(run: Run, out: Path, name: str) -> None:
    assert "nothing is known that serves nobody://" in call(run, name, "nobody://a/b", out, {})


def test_a_driver_without_what_it_needs(run: Run, out: Path) -> None:
    text = call(run, "ls", "hdfs://host/run", out, {})
    assert "needs the module pyarrow, which is not installed" in text


def test_a_url_that_lacks_a_slash(run: Run) -> None:
    result = run("ls", "s3:/bucket/run")
    assert result.exit_code == 2
    assert "is s3://bucket/run meant?" in result.stderr


def test_a_run_of_other_programs(run: Run, tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save({"a": torch.ones(2)}, tmp_path / "ours")
        ckpt.export(tmp_path / "ours", tmp_path / f"run/step-{step}", format="dcp")
        ckpt.delete(tmp_path / "ours")
    assert "step-2" in run("inspect", tmp_path / "run").stdout
    assert run("verify", tmp_path / "run").stdout.count(": intact (") == 2
    pruned = run("prune", tmp_path / "run", "--keep-last", 1)
    assert pruned.exit_code == 3
    assert "of other programs, of which dtckpt deletes nothing" in pruned.stderr


def test_advice_is_of_the_command_line(run: Run, tmp_path: Path) -> None:
    ckpt.save({"model": {"w": torch.ones(2)}, "n": 1}, tmp_path / "run/step-1")
    ckpt.save({"model": {"w": torch.ones(2)}, "n": 1}, tmp_path / "run/step-2")
    one = tmp_path / "run/step-1"
    result = run("convert", one, tmp_path / "hf", "--to", "safetensors")
    assert result.stderr.startswith(f"Error: {one}: safetensors files hold tensors only")
    assert result.stderr.endswith("choose a part, such as --part model\n")
    result = run("cat", tmp_path / "run")
    assert result.stderr.endswith("Give the path of one of them; dtckpt ls lists them\n")
    assert "step-1: 'nothing' selects nothing" in run("cat", one, "nothing").stderr
    result = run("extract", one, "model/v", "-o", tmp_path / "v.npy")
    assert "no tensor 'model/v'; did you mean 'model/w'?" in result.stderr
    (data,) = one.glob("data/*/*.safetensors")
    data.unlink()
    assert "[Errno" not in run("verify", one).stdout
    (one / "manifest.json").write_text("{}")
    assert "Remove it as other files" in run("rm", one).stderr


def of_s3(endpoint: str) -> dict[str, str]:
    """Storage options as the command takes them."""
    return {"client_kwargs.endpoint_url": endpoint, "key": '"key"', "secret": '"secret"'}
