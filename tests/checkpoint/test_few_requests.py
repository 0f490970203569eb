"""How many requests checkpoints cost on an object store, counted by the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.reading import limits
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import Corrupt, StorageError
from dtckpt.storage import open_store

from ..ranks import run_ranks
from ..servers.fake_s3 import BUCKET, FakeS3, fake_s3
from ..servers.faults import Fault

# botocore warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MIB = 1 << 20
RUN = f"s3://{BUCKET}/run"


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        yield running


def save(server: FakeS3, state: Any, step: int = 1, **options: Any) -> None:
    ckpt.save(state, f"{RUN}/step-{step}", storage_options=server.storage_options, **options)


def load(server: FakeS3, state: Any, step: int = 1) -> None:
    ckpt.load(state, f"{RUN}/step-{step}", storage_options=server.storage_options)


def save_on_ranks(server: FakeS3, num_ranks: int) -> None:
    """Save 100 rows in as many files as there are ranks."""

    def save_part(rank: int, group: Any) -> None:
        mesh = DeviceMesh("cpu", Mesh((num_ranks,)), rank=rank)
        rows = torch.arange(300.0).reshape(100, 3).chunk(num_ranks)[rank]
        save(
            server,
            {"w": DTensor.from_local(rows, mesh, [Shard(0)], shape=(100, 3))},
            process_group=group,
        )

    run_ranks(num_ranks, save_part)


def data_files(server: FakeS3) -> list[str]:
    return sorted(key for key in server.keys if "/data/" in key)


def test_a_small_file_is_one_request(server: FakeS3) -> None:
    save(server, {"w": torch.arange(10.0), "b": torch.ones(3)})
    server.forget()
    into = {"w": torch.zeros(10), "b": torch.zeros(3)}
    load(server, into)
    assert into["w"].tolist() == list(range(10))
    assert server.counts == {"get": 2}  # with the manifest


def test_a_large_file_is_read_in_the_fewest_requests(server: FakeS3) -> None:
    count = 40 * MIB // 4
    save(server, {"w": torch.arange(count, dtype=torch.int32)})
    server.forget()
    into = {"w": torch.zeros(count, dtype=torch.int32)}
    load(server, into)
    assert torch.equal(into["w"], torch.arange(count, dtype=torch.int32))
    assert server.counts == {"get": 1 + 2 + 3}  # manifest, both ends, 16 MiB at a time


def test_all_files_are_opened_at_the_same_time(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    server.forget()
    met = threading.Barrier(4)
    server.faults.append(
        Fault(kinds=["get"], match="/data/", does="answer", meanwhile=lambda: met.wait(30))
    )
    into = {"w": torch.zeros(100, 3)}
    load(server, into)
    assert torch.equal(into["w"], torch.arange(300.0).reshape(100, 3))
    assert server.counts == {"get": 1 + 4}


def test_files_that_are_not_needed_are_not_opened(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    server.forget()
    with ckpt.open(f"{RUN}/step-1", storage_options=server.storage_options) as checkpoint:
        assert checkpoint["w"][30].tolist() == [90.0, 91.0, 92.0]
        assert checkpoint["w"][31].tolist() == [93.0, 94.0, 95.0]
    assert server.counts == {"get": 1 + 1}


def test_files_that_open_stay_open_though_others_do_not(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    with ckpt.open(f"{RUN}/step-1", storage_options=server.storage_options) as checkpoint:
        begun = threading.Event()  # who has not begun when one fails does not
        others = Fault(match="/data/", does="answer")
        others.meanwhile = lambda: others.hits == 3 and begun.set()
        refused = Fault(match="/00001.", status=403, code="No", meanwhile=lambda: begun.wait(30))
        server.faults += [refused, others]
        with pytest.raises(StorageError):
            checkpoint["w"][...]
        server.faults.clear()
        server.forget()
        assert checkpoint["w"][99].tolist() == [297.0, 298.0, 299.0]
        assert not server.counts
        assert checkpoint["w"][...].sum() == 300 * 299 / 2
    assert server.counts == {"get": 1}


def test_what_was_not_changed_is_opened_at_the_same_time_elsewhere(server: FakeS3) -> None:
    options = server.storage_options
    for name in ("a", "b", "c"):
        state = {key: torch.full((10,), float(ord(key))) for key in "abc" if key <= name}
        base = f"{RUN}/step-{ord(name) - 1}" if name != "a" else None
        save(server, state, step=ord(name), **({"base": base} if base else {}))
    server.forget()
    met = threading.Barrier(2)
    server.faults.append(
        Fault(kinds=["get"], match="/data/", does="answer", skip=1, meanwhile=lambda: met.wait(30))
    )
    into = {key: torch.zeros(10) for key in "abc"}
    ckpt.load(into, f"{RUN}/step-{ord('c')}", storage_options=options)
    assert [into[key][0].item() for key in "abc"] == [97.0, 98.0, 99.0]
    assert server.counts == {"get": 1 + 1 + 2}


def verify(server: FakeS3, step: int = 1) -> ckpt.VerifyReport:
    return ckpt.verify(f"{RUN}/step-{step}", storage_options=server.storage_options)


def meeting(num_files: int, **more: Any) -> Fault:
    """Have files wait for each other to be asked for."""
    met = threading.Barrier(num_files)
    return Fault(
        kinds=["get"], match="/data/", does="answer", meanwhile=lambda: met.wait(30), **more
    )


def test_verification_opens_files_at_the_same_time(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    server.forget()
    server.faults.append(meeting(4))
    assert verify(server).problems == ()
    assert server.counts == {"get": 1 + 4, "list": 1}


def test_verification_opens_what_was_not_changed_at_the_same_time(server: FakeS3) -> None:
    for name in ("a", "b", "c"):
        state = {key: torch.full((10,), float(ord(key))) for key in "abc" if key <= name}
        base = {"base": f"{RUN}/step-{ord(name) - 1}"} if name != "a" else {}
        save(server, state, step=ord(name), **base)
    server.forget()
    server.faults.append(meeting(2, skip=1))
    assert verify(server, ord("c")).problems == ()
    assert server.counts == {"get": 1 + 1 + 2, "list": 3}


def test_verification_of_a_run_looks_at_each_place_once(server: FakeS3) -> None:
    state = {"w": torch.arange(10_000)}
    for step in range(1, 5):
        base = {"base": f"{RUN}/step-{step - 1}"} if step > 1 else {}
        save(server, state | {str(step): torch.ones(10)}, step=step, **base)
    (name,) = [name for name in data_files(server) if "/step-1/" in name]
    server.objects.put(BUCKET, name, server.keys[name].data + b"more")
    server.forget()
    verifier = ckpt.Verifier()
    for step in range(1, 5):
        store = open_store(f"{RUN}/step-{step}", **server.storage_options)
        [problem] = verifier.verify(store).problems
        assert problem.message.startswith(f"{RUN}/step-1/data/")
    assert server.counts["list"] == 4


def test_who_may_not_list_can_verify(server: FakeS3, caplog: pytest.LogCaptureFixture) -> None:
    save_on_ranks(server, 2)
    server.faults.append(Fault(kinds=["list"], status=403, code="AccessDenied"))
    assert verify(server).problems == ()
    assert "not looked for what is behind files" in caplog.text


def test_verification_tells_each_file_that_does_not_open(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    names = data_files(server)
    for name in names[1:3]:
        del server.keys[name]
    problems = verify(server).problems
    assert [problem.file for problem in problems] == [
        name.removeprefix("run/step-1/") for name in names[1:3]
    ]
    assert all("this data file is missing" in problem.message for problem in problems)


def test_several_reads_are_on_their_way(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", MIB)
    count = 16 * MIB // 4
    save(server, {"w": torch.arange(count, dtype=torch.int32)})
    server.forget()
    server.latency = 0.2
    load(server, {"w": torch.zeros(count, dtype=torch.int32)})
    assert server.counts == {"get": 1 + 2 + 16}
    assert limits.NUM_READERS < server.peak <= limits.NUM_REMOTE_READERS


def test_what_is_wrong_with_a_file_is_told_without_asking_for_its_size_first(
    server: FakeS3,
) -> None:
    save(server, {"w": torch.arange(10.0)})
    (name,) = data_files(server)
    good = server.keys[name].data
    for data, message in (
        (good[:-1], f"has {len(good) - 1} bytes, expected {len(good)}; it was truncated"),
        (good[:10], f"has 10 bytes, expected {len(good)}; it was truncated"),
        (b"", f"has 0 bytes, expected {len(good)}; it was truncated"),
        (good + b"x" * len(good), None),
        (b"x" + good[1:], r"bytes 0 to 4096 \(header\) are damaged"),
        (good[:-1] + b"x", r"\(checksum table\) are damaged"),
    ):
        server.objects.put(BUCKET, name, data)
        if message is None:  # what was written is all there
            load(server, {"w": torch.zeros(10)})
            continue
        with pytest.raises(Corrupt, match=message):
            load(server, {"w": torch.zeros(10)})
    del server.keys[name]
    with pytest.raises(Corrupt, match="this data file is missing"):
        load(server, {"w": torch.zeros(10)})


def test_looking_for_the_newest_lists_one_level(server: FakeS3) -> None:
    for step in range(3):
        save(server, {"w": torch.zeros(1)}, step=step)
    server.forget()
    newest = ckpt.latest(RUN, storage_options=server.storage_options)
    assert newest is not None
    assert newest.number == 2
    # The run, which manifests are there, the newest manifest, and the data files of that.
    assert server.counts == {"list": 2, "head": 3, "get": 1}


def test_what_a_save_asks_for(server: FakeS3) -> None:
    save(server, {"w": torch.zeros(10)})
    # Whether one is there, before anything is written; the file; whether all files are there, with
    # their sizes; the manifest on condition that none is there; what it is read back.
    assert server.counts == {"head": 2, "put": 2, "list": 1, "get": 1}


def test_more_ranks_ask_for_a_put_more_each(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    assert server.counts == {"head": 2, "put": 1 + 4, "list": 1, "get": 1}


def test_what_the_save_of_a_large_file_asks_for(server: FakeS3) -> None:
    save(server, {"w": torch.zeros(40 * MIB // 4)})
    # Completing an upload takes no condition, so its name is looked for first; and its size is
    # compared, since the server has only checked the parts.
    assert server.counts == {
        "begin-upload": 1,
        "upload-part": 3,
        "complete-upload": 1,
        "head": 2 + 2,
        "put": 1,
        "list": 1,
        "get": 1,
    }


def test_what_a_deletion_asks_for(server: FakeS3) -> None:
    save_on_ranks(server, 4)
    server.forget()
    ckpt.delete(f"{RUN}/step-1", storage_options=server.storage_options)
    assert not server.keys
    assert server.counts["delete-many"] == 1  # of the data files
    assert server.counts.total() <= 12
