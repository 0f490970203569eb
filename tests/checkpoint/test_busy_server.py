"""Saves to an S3 server that is busy, loses replies or sits behind something that alters bodies.

``python -m tests.checkpoint.test_busy_server`` makes many saves at several shares of refusals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import AccessDenied, AlreadyCommitted, CheckpointError, StorageError
from dtckpt.storage import Store, open_store

from ..servers.fake_s3 import BUCKET, FakeS3, fake_s3
from ..servers.faults import Fault, Kind

# botocore warns of its own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("short_pauses"),
]

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as running:
        yield running


@pytest.fixture
def options(server: FakeS3) -> dict[str, Any]:
    return server.storage_options


@pytest.fixture
def store(options: dict[str, Any]) -> Store:
    """What goes there by itself."""
    return open_store(URL, **options)


def state(value: float = 1.0) -> dict[str, Any]:
    """Something to save."""
    return {"w": torch.full((1000,), value), "n": value}


def save(value: float, options: dict[str, Any], *, overwrite: bool = False) -> None:
    """Save something with this value."""
    dcp.save(state(value), URL, storage_options=options, overwrite=overwrite, no_dist=True)


def saved(options: dict[str, Any]) -> float:
    """Return the value of what was saved."""
    into = state(0.0)
    dcp.load(into, URL, storage_options=options, no_dist=True)
    assert (into["w"] == into["n"]).all()
    return into["n"]


def save_many(options: dict[str, Any], count: int) -> list[str]:
    """Save so many times over the same checkpoint and load it; return the failures."""
    failures: list[str] = []
    for number in range(count):
        try:
            save(float(number), options, overwrite=True)
            assert saved(options) == number
        except CheckpointError as error:
            failures.append(f"{number}: {error}")
    return failures


def of_manifest(*kinds: Kind, **more: Any) -> Fault:
    """Return a fault of requests of these kinds that are about the manifest."""
    return Fault(kinds=kinds, match="manifest.json", **more)


def denied(*kinds: Kind, **more: Any) -> Fault:
    """Return the fault of a server at which these kinds are not allowed on the manifest."""
    return of_manifest(*kinds, status=403, code="AccessDenied", **more)


def hits(server: FakeS3) -> list[int]:
    """Return how many requests each fault has hit."""
    return [fault.hits for fault in server.faults]


def test_a_busy_server_is_asked_again(server: FakeS3, options: dict[str, Any]) -> None:
    server.faults = [Fault(share=0.1)]
    assert save_many(options, 3) == []
    assert server.faults[0].hits > 0


@pytest.mark.parametrize("kinds", [{"head"}, {"put"}, {"get", "list"}])
def test_refusals_in_a_row(server: FakeS3, options: dict[str, Any], kinds: set[Kind]) -> None:
    server.faults = [Fault(kinds=kinds, limit=3)]
    save(2.0, options)
    assert hits(server) == [3]
    assert saved(options) == 2.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_conflicts_of_conditional_requests_are_tried_again(
    server: FakeS3, options: dict[str, Any], overwrite: bool
) -> None:
    if overwrite:
        save(1.0, options)
    server.faults = [of_manifest("put", status=409, code="ConditionalRequestConflict", limit=2)]
    save(2.0, options, overwrite=overwrite)
    assert hits(server) == [2]
    assert saved(options) == 2.0


def without_conditions(**more: Any) -> Fault:
    """Return the fault of a server that does not know conditions."""
    return of_manifest("put", status=501, code="NotImplemented", limit=1, **more)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_server_that_knows_no_conditions(
    server: FakeS3, options: dict[str, Any], overwrite: bool
) -> None:
    if overwrite:
        save(1.0, options)
    server.faults = [without_conditions()]
    save(2.0, options, overwrite=overwrite)
    assert hits(server) == [1]
    assert saved(options) == 2.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rival_is_seen_where_the_server_knows_no_conditions(
    server: FakeS3, options: dict[str, Any], store: Store, overwrite: bool
) -> None:
    if overwrite:
        save(1.0, options)

    def win() -> None:
        dcp.save(state(3.0), store, overwrite=overwrite, no_dist=True)

    with ThreadPoolExecutor(1) as pool:
        server.faults = [without_conditions(meanwhile=lambda: pool.submit(win).result())]
        with pytest.raises(AlreadyCommitted, match="another save committed") as caught:
            save(2.0, options, overwrite=overwrite)
    assert caught.value.is_certain
    assert saved(options) == 3.0
    assert len(list(store.list())) == 2


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
    server: FakeS3, options: dict[str, Any], status: int, code: str, carry_out: bool
) -> None:
    save(1.0, options)
    server.faults = [
        of_manifest("delete", status=status, code=code, limit=1, carry_out=carry_out),
    ]
    dcp.delete(URL, storage_options=options)
    assert hits(server) == [1]
    assert server.keys == {}


def test_a_deletion_is_not_for_what_only_seems_to_be_missing(
    server: FakeS3, options: dict[str, Any]
) -> None:
    """The reply to a HEAD has no code: a missing bucket looks like a missing object."""
    save(1.0, options)
    server.faults = [Fault(kinds={"head"}, status=404, code="NoSuchBucket")]
    with pytest.raises(StorageError, match="both as missing and as there"):
        dcp.delete(URL, storage_options=options)
    server.faults = []
    assert saved(options) == 1.0


def test_a_deletion_that_is_refused_leaves_all_as_it_was(
    server: FakeS3, options: dict[str, Any]
) -> None:
    save(1.0, options)
    server.faults = [denied("delete")]
    with pytest.raises(StorageError, match="cannot delete"):
        dcp.delete(URL, storage_options=options)
    assert len(server.keys) == 2
    assert saved(options) == 1.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_lost_replies_of_the_manifest(
    server: FakeS3, options: dict[str, Any], overwrite: bool
) -> None:
    if overwrite:
        save(1.0, options)
    server.faults = [of_manifest("put", carry_out=True, limit=2)]
    save(2.0, options, overwrite=overwrite)
    assert hits(server) == [2]
    assert saved(options) == 2.0


def test_a_refusal_is_certain_and_its_data_goes(server: FakeS3, options: dict[str, Any]) -> None:
    save(1.0, options)
    server.faults = [denied("put")]
    with pytest.raises(StorageError) as caught:
        save(2.0, options, overwrite=True)
    assert caught.value.is_certain
    server.faults = []
    assert saved(options) == 1.0
    assert dcp.clean(URL, storage_options=options) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_refusal_of_the_second_request_says_nothing_of_the_first(
    server: FakeS3, options: dict[str, Any], overwrite: bool
) -> None:
    if overwrite:
        save(1.0, options)
    server.faults = [of_manifest("put", does="keep", limit=1), denied("put")]
    with pytest.raises(StorageError) as caught:
        save(2.0, options, overwrite=overwrite)
    assert hits(server) == [1, 1]
    assert not caught.value.is_certain
    server.faults = []
    assert server.deliver() == [200]
    assert saved(options) == 2.0


def test_a_refusal_is_not_certain_where_nothing_can_be_read_back(
    server: FakeS3, options: dict[str, Any]
) -> None:
    def deny_all() -> None:
        server.faults = [denied()]

    server.faults = [denied("put", carry_out=True, meanwhile=deny_all)]
    with pytest.raises(StorageError) as caught:
        save(2.0, options)
    assert hits(server)[0] > 0
    assert not caught.value.is_certain
    server.faults = []
    assert saved(options) == 2.0


def test_an_altered_manifest_does_not_cost_what_was_there(
    server: FakeS3, options: dict[str, Any]
) -> None:
    save(1.0, options)
    server.faults = [of_manifest("put", does="alter", limit=1)]
    with pytest.raises(StorageError, match="other bytes are there although"):
        save(2.0, options, overwrite=True)
    assert hits(server) == [1]
    assert saved(options) == 1.0


def test_what_the_server_has_confirmed_need_not_be_readable(
    server: FakeS3, options: dict[str, Any]
) -> None:
    server.faults = [Fault(kinds={"get", "head", "list"}, status=403, code="AccessDenied")]
    open_store(URL, **options).publish("x", b"written", overwrite=True)
    assert hits(server) == [0], "who needs to know reads it back"
    assert server.keys["run/x"].data == b"written"


def test_a_swallowed_manifest_is_not_taken_for_a_rival(
    server: FakeS3, options: dict[str, Any]
) -> None:
    server.faults = [of_manifest("put", does="swallow")]
    with pytest.raises(StorageError, match="nothing is there although") as caught:
        save(2.0, options)
    assert not isinstance(caught.value, AlreadyCommitted)
    assert not caught.value.is_certain


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchBucket")])
def test_a_listing_that_is_denied_is_not_empty(
    server: FakeS3, options: dict[str, Any], status: int, code: str
) -> None:
    save(1.0, options)
    server.faults = [Fault(kinds={"list"}, status=status, code=code)]
    with pytest.raises(StorageError, match="cannot list"):
        dcp.latest(URL.rpartition("/")[0], storage_options=options, no_dist=True)


def callers(options: dict[str, Any]) -> list[Callable[[], object]]:
    """Return what looks at the checkpoint, and its run."""
    run = URL.rpartition("/")[0]
    store = open_store(URL, **options)
    return [
        lambda: dcp.latest(run, storage_options=options, no_dist=True),
        lambda: dcp.committed_steps(run, storage_options=options),
        lambda: dcp.CheckpointManager(run, storage_options=options).latest(),
        lambda: dcp.clean(run, storage_options=options),
        lambda: list(store.list()),
        lambda: list(store.leftovers()),
        store.level,
    ]


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_who_may_not_look_is_told(server: FakeS3, options: dict[str, Any], engine: str) -> None:
    pytest.importorskip(engine)
    save(1.0, options)
    server.faults = [Fault(kinds={"list", "get", "head"}, status=403, code="AccessDenied")]
    for number, call in enumerate(callers({**options, "engine": engine})):
        with pytest.raises(AccessDenied, match="cannot"):
            pytest.fail(f"{number}: {call()}")
    with pytest.raises(AccessDenied, match="or it is missing"):
        dcp.load(state(), URL, storage_options={**options, "engine": engine}, no_dist=True)


def test_age_is_by_the_clock_of_the_store(server: FakeS3, options: dict[str, Any]) -> None:
    """What is ten minutes old to us has just been written."""
    server.clock_skew = -600.0
    save(1.0, options)
    source = next(name for name in server.keys if name.endswith(".safetensors"))
    save_id = source.split("/")[-2]
    server.objects.put(
        BUCKET, f"run/dead/data/{save_id}/00000.safetensors", server.keys[source].data
    )
    assert dcp.clean(URL, storage_options=options, older_than=timedelta(minutes=5)) == []
    server.clock_skew = 0.0
    gone = dcp.clean(URL, storage_options=options, older_than=timedelta(minutes=5))
    assert gone == [f"dead/data/{save_id}/00000.safetensors"]
    assert saved(options) == 1.0
    assert not [name for name in server.keys if "dtckpt-time" in name]


def main() -> None:
    """Make 25 saves at each share of refusals, and tell how many failed."""
    for share in (0.0, 0.1, 0.2):
        with fake_s3() as server:
            server.faults = [Fault(share=share)]
            started = time.perf_counter()
            failures = save_many(server.storage_options, 25)
            seconds = time.perf_counter() - started
            print(
                f"{share:.0%} refused ({server.faults[0].hits} requests): {25 - len(failures)} of "
                f"25 saved and loaded in {seconds:.0f} s",
                *failures,
                sep="\n  ",
                flush=True,
            )


if __name__ == "__main__":
    main()
