"""Checkpoints on object storage: fsspec's memory file system and a real S3 server on loopback."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import AlreadyCommitted, Corrupt, NotCommitted
from dtckpt.storage import open_store

from ..conftest import S3
from ..ranks import run_ranks

# moto and botocore warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def state(value: float = 0.0) -> dict[str, Any]:
    """Some tensors and values."""
    return {
        "w": torch.full((300, 40), value),
        "b": torch.full((7,), value).bfloat16(),
        "step": value,
    }


def test_ranks_save_to_s3_and_one_loads(s3: S3) -> None:
    def save(rank: int, group: Any) -> None:
        dcp.save(state(3.0), f"{s3.url}/step-1", process_group=group, storage_options=s3.options)

    run_ranks(2, save)
    into = state()
    report = dcp.load(into, f"{s3.url}/step-1", storage_options=s3.options)
    assert (into["w"] == 3).all()
    assert into["step"] == 3.0
    assert report.url == f"{s3.url}/step-1"
    with dcp.open(f"{s3.url}/step-1", storage_options=s3.options) as checkpoint:
        assert checkpoint["w"][2:4, 5].tolist() == [3.0, 3.0]
    assert dcp.verify(f"{s3.url}/step-1", storage_options=s3.options).problems == ()
    latest = dcp.latest(s3.url, storage_options=s3.options)
    assert latest is not None
    assert latest.number == 1


def test_a_compressed_file_is_uploaded_in_parts_and_ends_early(s3: S3) -> None:
    """What it may have is several parts, and what it has one short one, or two."""
    noise = torch.randint(256, (20 << 20,), dtype=torch.uint8)
    for number, value in enumerate((torch.zeros(40 << 20, dtype=torch.uint8), noise)):
        url = f"{s3.url}/step-{number}"
        given = {"x": value, "zeros": torch.zeros(5 << 20)}
        dcp.save(given, url, storage_options=s3.options, compress="zstd")
        store = open_store(url, **s3.options)
        (record,) = dcp.read_manifest(store).files
        assert [info.size for info in store.list("data")] == [record.size]
        assert record.size < record.data_bytes - (15 << 20)
        with dcp.open(store) as checkpoint:
            assert torch.equal(checkpoint["x"][...], value)
            assert torch.equal(checkpoint["x"][5 << 20 : 6 << 20], value[5 << 20 : 6 << 20])


def test_reshard_from_disk_to_s3_and_back(s3: S3, tmp_path: Any) -> None:
    from dtckpt.dtensor import Mesh

    dcp.save(state(5.0), tmp_path / "a")
    rules, mesh = dcp.parse_rules("w=S(0),S(1)"), Mesh.parse("dp=2,tp=2")
    cloud = open_store(f"{s3.url}/b", **s3.options)
    dcp.reshard(tmp_path / "a", cloud, mesh, rules)
    dcp.reshard(cloud, tmp_path / "c", Mesh.parse("x=3"), dcp.parse_rules("w=S(1)"))
    into = state()
    dcp.load(into, tmp_path / "c")
    assert (into["w"] == 5).all()


def test_an_uncommitted_or_damaged_object_is_not_loaded(s3: S3) -> None:
    url = f"{s3.url}/step-2"
    dcp.save(state(1.0), url, storage_options=s3.options)
    with pytest.raises(AlreadyCommitted):
        dcp.save(state(2.0), url, storage_options=s3.options)
    store = open_store(url, **s3.options)
    (name,) = [info.name for info in store.list("data")]
    data = bytearray(store.read(name))
    data[5000] ^= 1
    s3.client.put_object(Bucket=bucket(s3), Key=s3.key(f"step-2/{name}"), Body=bytes(data))
    with pytest.raises(Corrupt, match="are damaged"):
        dcp.load(state(), url, storage_options=s3.options)
    s3.client.delete_object(Bucket=bucket(s3), Key=s3.key("step-2/manifest.json"))
    with pytest.raises(NotCommitted):
        dcp.load(state(), url, storage_options=s3.options)


def test_one_of_two_racing_jobs_commits(s3: S3) -> None:
    results: list[object] = []
    barrier = threading.Barrier(2)

    def job(value: float) -> None:
        store = open_store(f"{s3.url}/race", **s3.options)
        barrier.wait(10)
        try:
            dcp.save(state(value), store)
            results.append(value)
        except AlreadyCommitted:
            results.append(AlreadyCommitted)

    threads = [threading.Thread(target=job, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [result for result in results if isinstance(result, float)]
    into = state()
    dcp.load(into, f"{s3.url}/race", storage_options=s3.options)
    assert (into["w"] == winner).all()
    assert into["step"] == winner


def test_any_fsspec_url() -> None:
    url = "memory://dtckpt-object-storage-test/step-1"
    dcp.save(state(4.0), url)
    into = state()
    dcp.load(into, url)
    assert (into["w"] == 4).all()


def bucket(s3: S3) -> str:
    """The bucket's name."""
    return s3.url.removeprefix("s3://").partition("/")[0]
