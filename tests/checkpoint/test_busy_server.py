"""Saves to an S3 server that is busy, loses replies or sits behind something that alters bodies.

``python -m tests.checkpoint.test_busy_server`` makes many saves at several shares of refusals.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import AlreadyCommitted, CheckpointError, StorageError
from dtckpt.storage import open_store
from tools.demo.s3 import loopback_bucket

from ..conftest import BUCKET, S3
from ..storage.fault_proxy import FaultProxy, Trouble, fault_proxy

# moto and botocore warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def proxy(s3_endpoint: str, s3_client: Any) -> Iterator[FaultProxy]:
    with fault_proxy(s3_endpoint) as running:
        yield running


@pytest.fixture
def options(proxy: FaultProxy, s3_options: dict[str, Any]) -> dict[str, Any]:
    return through(proxy, s3_options)


def through(proxy: FaultProxy, s3_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that lead to the proxy."""
    found = copy.deepcopy(s3_options)
    found["client_kwargs"]["endpoint_url"] = proxy.url
    return found


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def state(value: float = 1.0) -> dict[str, Any]:
    """Something to save."""
    return {"w": torch.full((1000,), value), "n": value}


def value_at(url: str, options: dict[str, Any]) -> float:
    """Return what was saved."""
    into = state(0.0)
    dcp.load(into, url, storage_options=options, no_dist=True)
    assert (into["w"] == into["n"]).all()
    return into["n"]


def save_many(proxy: FaultProxy, options: dict[str, Any], url: str, count: int) -> list[str]:
    """Save so many times over the same checkpoint and load it; return the failures."""
    failures: list[str] = []
    for number in range(count):
        try:
            dcp.save(
                state(float(number)), url, storage_options=options, overwrite=True, no_dist=True
            )
            assert value_at(url, options) == number
        except CheckpointError as error:
            failures.append(f"{number}: {error}")
    return failures


def test_a_busy_server_is_asked_again(proxy: FaultProxy, options: dict[str, Any], url: str) -> None:
    proxy.trouble = Trouble(share=0.1)
    assert save_many(proxy, options, url, 3) == []
    assert proxy.trouble.hits > 0


@pytest.mark.parametrize("method", ["HEAD", "PUT", "GET"])
def test_refusals_in_a_row(
    proxy: FaultProxy, options: dict[str, Any], url: str, method: str
) -> None:
    proxy.trouble = Trouble(share=1.0, limit=3, methods=frozenset({method}))
    dcp.save(state(2.0), url, storage_options=options, no_dist=True)
    assert proxy.trouble.hits == 3
    assert value_at(url, options) == 2.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_conflicts_of_conditional_requests_are_tried_again(
    proxy: FaultProxy, options: dict[str, Any], url: str, overwrite: bool
) -> None:
    if overwrite:
        dcp.save(state(1.0), url, storage_options=options, no_dist=True)
    proxy.trouble = Trouble(
        status=409,
        code="ConditionalRequestConflict",
        share=1.0,
        limit=2,
        methods=frozenset({"PUT"}),
        match="manifest.json",
    )
    dcp.save(state(2.0), url, storage_options=options, overwrite=overwrite, no_dist=True)
    assert proxy.trouble.hits == 2
    assert value_at(url, options) == 2.0


def without_conditions(**more: Any) -> Trouble:
    """Return the trouble of a server that does not know conditions."""
    return Trouble(
        status=501,
        code="NotImplemented",
        share=1.0,
        limit=1,
        methods=frozenset({"PUT"}),
        match="manifest.json",
        **more,
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_server_that_knows_no_conditions(
    proxy: FaultProxy, options: dict[str, Any], url: str, overwrite: bool
) -> None:
    if overwrite:
        dcp.save(state(1.0), url, storage_options=options, no_dist=True)
    proxy.trouble = without_conditions()
    dcp.save(state(2.0), url, storage_options=options, overwrite=overwrite, no_dist=True)
    assert proxy.trouble.hits == 1
    assert value_at(url, options) == 2.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rival_is_seen_where_the_server_knows_no_conditions(
    proxy: FaultProxy, options: dict[str, Any], s3: S3, overwrite: bool
) -> None:
    if overwrite:
        dcp.save(state(1.0), s3.url, storage_options=options, no_dist=True)

    def win() -> None:
        dcp.save(state(3.0), s3.store, overwrite=overwrite, no_dist=True)

    with ThreadPoolExecutor(1) as pool:
        proxy.trouble = without_conditions(meanwhile=lambda: pool.submit(win).result())
        with pytest.raises(AlreadyCommitted, match="another save committed") as caught:
            dcp.save(state(2.0), s3.url, storage_options=options, overwrite=overwrite, no_dist=True)
    assert caught.value.is_certain
    assert value_at(s3.url, options) == 3.0
    assert len(list(s3.store.list())) == 2


@pytest.mark.parametrize(
    ("status", "code", "carry_out"),
    [
        (409, "ConditionalRequestConflict", False),
        (501, "NotImplemented", False),
        (412, "PreconditionFailed", True),  # as a repeated request finds it
        (403, "AccessDenied", True),
    ],
)
def test_a_deletion_whose_condition_is_not_answered_plainly(
    proxy: FaultProxy, options: dict[str, Any], s3: S3, status: int, code: str, carry_out: bool
) -> None:
    dcp.save(state(1.0), s3.store, no_dist=True)
    proxy.trouble = Trouble(
        status=status,
        code=code,
        share=1.0,
        limit=1,
        methods=frozenset({"DELETE"}),
        match="manifest.json",
        carry_out=carry_out,
    )
    dcp.delete(s3.url, storage_options=options)
    assert proxy.trouble.hits == 1
    assert list(s3.store.list()) == []


def test_a_deletion_that_is_refused_leaves_all_as_it_was(
    proxy: FaultProxy, options: dict[str, Any], s3: S3
) -> None:
    dcp.save(state(1.0), s3.store, no_dist=True)
    proxy.trouble = Trouble(
        status=403,
        code="AccessDenied",
        share=1.0,
        methods=frozenset({"DELETE"}),
        match="manifest.json",
    )
    with pytest.raises(StorageError, match="cannot delete"):
        dcp.delete(s3.url, storage_options=options)
    assert len(list(s3.store.list())) == 2
    assert value_at(s3.url, options) == 1.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_lost_replies_of_the_manifest(
    proxy: FaultProxy, options: dict[str, Any], url: str, overwrite: bool
) -> None:
    if overwrite:
        dcp.save(state(1.0), url, storage_options=options, no_dist=True)
    proxy.trouble = Trouble(
        share=1.0, limit=2, methods=frozenset({"PUT"}), match="manifest.json", carry_out=True
    )
    dcp.save(state(2.0), url, storage_options=options, overwrite=overwrite, no_dist=True)
    assert proxy.trouble.hits == 2
    assert value_at(url, options) == 2.0


def test_a_refusal_is_certain_and_its_data_goes(
    proxy: FaultProxy, options: dict[str, Any], url: str
) -> None:
    dcp.save(state(1.0), url, storage_options=options, no_dist=True)
    proxy.trouble = Trouble(
        status=403,
        code="AccessDenied",
        share=1.0,
        methods=frozenset({"PUT"}),
        match="manifest.json",
    )
    with pytest.raises(StorageError) as caught:
        dcp.save(state(2.0), url, storage_options=options, overwrite=True, no_dist=True)
    assert caught.value.is_certain
    proxy.trouble = Trouble()
    assert value_at(url, options) == 1.0
    assert dcp.clean(url, storage_options=options) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_refusal_of_the_second_request_says_nothing_of_the_first(
    proxy: FaultProxy, options: dict[str, Any], url: str, overwrite: bool
) -> None:
    if overwrite:
        dcp.save(state(1.0), url, storage_options=options, no_dist=True)
    refusal = Trouble(
        status=403,
        code="AccessDenied",
        share=1.0,
        methods=frozenset({"PUT"}),
        match="manifest.json",
    )
    proxy.trouble = replace(refusal, late=True, limit=1, then=refusal)
    with pytest.raises(StorageError) as caught:
        dcp.save(state(2.0), url, storage_options=options, overwrite=overwrite, no_dist=True)
    assert (proxy.trouble.hits, refusal.hits) == (1, 1)
    assert not caught.value.is_certain
    proxy.trouble = Trouble()
    assert proxy.deliver() == [200]
    assert value_at(url, options) == 2.0


def test_a_refusal_is_not_certain_where_nothing_can_be_read_back(
    proxy: FaultProxy, options: dict[str, Any], url: str
) -> None:
    denied = Trouble(status=403, code="AccessDenied", share=1.0, match="manifest.json")
    proxy.trouble = replace(
        denied, methods=frozenset({"PUT"}), limit=1, carry_out=True, then=denied
    )
    with pytest.raises(StorageError) as caught:
        dcp.save(state(2.0), url, storage_options=options, no_dist=True)
    assert not caught.value.is_certain
    proxy.trouble = Trouble()
    assert value_at(url, options) == 2.0


def test_an_altered_manifest_does_not_cost_what_was_there(
    proxy: FaultProxy, options: dict[str, Any], url: str
) -> None:
    dcp.save(state(1.0), url, storage_options=options, no_dist=True)
    proxy.trouble = Trouble(
        share=1.0, limit=1, methods=frozenset({"PUT"}), match="manifest.json", alter=True
    )
    with pytest.raises(StorageError, match="other bytes are there although"):
        dcp.save(state(2.0), url, storage_options=options, overwrite=True, no_dist=True)
    assert proxy.trouble.hits == 1
    assert value_at(url, options) == 1.0


def test_what_the_server_has_confirmed_need_not_be_readable(
    proxy: FaultProxy, options: dict[str, Any], s3: S3
) -> None:
    proxy.trouble = Trouble(
        status=403, code="AccessDenied", share=1.0, methods=frozenset({"GET", "HEAD"})
    )
    open_store(s3.url, **options).publish("x", b"written", overwrite=True)
    assert proxy.trouble.hits == 0, "who needs to know reads it back"
    assert s3.store.read("x") == b"written"


def test_a_swallowed_manifest_is_not_taken_for_a_rival(
    proxy: FaultProxy, options: dict[str, Any], url: str
) -> None:
    proxy.trouble = Trouble(
        share=1.0, methods=frozenset({"PUT"}), match="manifest.json", swallow=True
    )
    with pytest.raises(StorageError, match="nothing is there although") as caught:
        dcp.save(state(2.0), url, storage_options=options, no_dist=True)
    assert not isinstance(caught.value, AlreadyCommitted)
    assert not caught.value.is_certain


@pytest.mark.parametrize("status", [403, 404])
def test_a_listing_that_is_denied_is_not_empty(
    proxy: FaultProxy, options: dict[str, Any], url: str, status: int
) -> None:
    dcp.save(state(1.0), f"{url}/step-1", storage_options=options, no_dist=True)
    proxy.trouble = Trouble(
        status=status,
        code="AccessDenied" if status == 403 else "NoSuchBucket",
        share=1.0,
        methods=frozenset({"GET"}),
        match="list-type",
    )
    with pytest.raises(StorageError, match="cannot list"):
        dcp.latest(url, storage_options=options, no_dist=True)


def main() -> None:
    """Make 25 saves at each share of refusals, and tell how many failed."""
    given = {"key": "test", "secret": "test"}
    with loopback_bucket(BUCKET) as bucket, fault_proxy(bucket.endpoint) as proxy:
        options = {
            **given,
            "client_kwargs": {"endpoint_url": proxy.url, "region_name": "us-east-1"},
        }
        for share in (0.0, 0.1, 0.2):
            proxy.trouble = Trouble(share=share)
            started = time.perf_counter()
            failures = save_many(proxy, options, f"s3://{BUCKET}/{uuid.uuid4().hex}", 25)
            seconds = time.perf_counter() - started
            print(
                f"{share:.0%} refused ({proxy.trouble.hits} requests): {25 - len(failures)} of 25 "
                f"saved and loaded in {seconds:.0f} s",
                *failures,
                sep="\n  ",
                flush=True,
            )


if __name__ == "__main__":
    main()
