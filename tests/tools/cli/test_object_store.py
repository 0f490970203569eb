"""Commands that look, check and change, on an object store."""

from __future__ import annotations

import http.server
import io
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import dtckpt.checkpoint as dcp

from ...conftest import BUCKET, S3
from ...servers.fake_s3 import BUCKET as FAKE_BUCKET
from ...servers.fake_s3 import fake_s3
from ...servers.faults import Fault
from .conftest import Run, document

W = torch.arange(400_000.0).reshape(400, 1000)


@pytest.fixture
def options(s3: S3) -> list[str]:
    return [part for key, value in s3.options.items() for part in ("--option", _pair(key, value))]


def _pair(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


@pytest.fixture
def state(s3: S3) -> dict[str, Any]:
    state = {"model": {"w": W, "b": torch.ones(9).bfloat16()}, "step": 3}
    dcp.save(state, s3.store.substore("run/step-3"))
    return state


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of botocore
@pytest.mark.parametrize("status", [403, 500, 503])
@pytest.mark.parametrize("what", ["data", "manifest.json"])
def test_verify_says_that_the_storage_fails(
    run: Run, short_pauses: None, status: int, what: str
) -> None:
    with fake_s3() as server:
        url = f"s3://{FAKE_BUCKET}/step-1"
        dcp.save({"w": W}, url, storage_options=server.storage_options)
        options = [
            part
            for key, value in {**server.storage_options, "deadline": 1}.items()
            for part in ("--option", _pair(key, value))
        ]
        assert run("verify", url, *options).exit_code == 0
        code = "AccessDenied" if status == 403 else "InternalError"
        server.faults = [Fault(kinds=("get",), match=what, status=status, code=code)]
        result = run("verify", url, *options)
        assert result.exit_code == 3, (result.stdout, result.stderr)
        assert "damaged" not in result.stdout + result.stderr
        server.faults = []
        assert run("verify", url, *options).exit_code == 0


def test_values_elements_and_parts(
    run: Run, s3: S3, options: list[str], state: dict[str, Any], tmp_path: Path
) -> None:
    place = f"{s3.url}/run/step-3"
    assert run("cat", place, "step", *options).stdout == "3\n"
    shown = run("cat", place, "model/w[::200, 5:8]", *options).stdout
    assert shown == f"{W.numpy()[::200, 5:8]}\n"
    there = f"{s3.url}/rows.npy"
    assert run("extract", place, "model/w[7, 3::100]", "-o", there, *options).exit_code == 0
    rows = np.load(io.BytesIO(s3.store.read("rows.npy", 0, s3.store.stat("rows.npy").size)))
    np.testing.assert_array_equal(rows, W.numpy()[7, 3::100])
    assert run("extract", place, "model/w", "-o", there, *options).exit_code == 3
    of_source = ["--source-option" if part == "--option" else part for part in options]
    here = tmp_path / "w.safetensors"
    assert run("extract", place, "model/w", "-o", here, *of_source).exit_code == 0
    np.testing.assert_array_equal(load_file(here)["model/w"], W.numpy())
    found = document(run("inspect", place, "--tensor", "model/w", "--json", *options))
    assert found["tensors"]["model/w"]["max"] == 399_999


def test_edited_compared_and_repaired(
    run: Run, s3: S3, options: list[str], state: dict[str, Any], tmp_path: Path
) -> None:
    """From and with a copy on a disk, to which the options of the object store are nothing."""
    place, copy = f"{s3.url}/run/step-3", tmp_path / "copy"
    assert run("copy", place, copy, *options).exit_code == 0
    assert run("edit", place, "--rename", "model/b=model/c", *options).exit_code == 0
    for both in ((place, copy), (copy, place)):
        found = document(run("diff", *both, "--json", *options))
        assert sorted(map(sorted, found["only"])) == [["model/b"], ["model/c"]]
    assert run("diff", place, copy, "--rename", "model/c=model/b", *options).exit_code == 0
    [name] = [info.name for info in s3.store.list("run/step-3/data")]
    good = s3.store.read(name, 0, s3.store.stat(name).size)
    spoiled = bytearray(good)
    spoiled[5000] ^= 1
    s3.client.put_object(Bucket=BUCKET, Key=s3.key(name), Body=bytes(spoiled))
    result = run("verify", place, *options)
    assert result.exit_code == 1
    assert "belong to model/w" in result.stdout
    result = run("verify", place, "--repair-from", copy, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert s3.store.read(name, 0, s3.store.stat(name).size) == good
    assert run("cat", place, "model/c[0]", *options).stdout == "1.\n"


class Whole(http.server.SimpleHTTPRequestHandler):
    """Answers with whole files, whatever range is asked for."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_verify_says_that_a_server_knows_no_ranges(run: Run, tmp_path: Path) -> None:
    save_file({"w": np.ones(1000, np.float32)}, tmp_path / "w.safetensors")
    handler = partial(Whole, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        result = run("verify", f"http://127.0.0.1:{server.server_address[1]}/w.safetensors")
        server.shutdown()
        thread.join()
    assert result.exit_code == 3, (result.stdout, result.stderr)
    assert "more than asked for" in result.stderr
    assert "damaged" not in result.stdout + result.stderr
