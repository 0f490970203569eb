"""What tests share: settings, and a real S3 server on loopback for all that ask for it."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from dtckpt.storage import Store, open_store

# Ranks that are threads have threads of OpenMP each, more by far than there are cores. Told so
# before torch is loaded, those sleep while they wait for work instead of turning in a loop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long one example takes says more about what else the machine does than about the code.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# What is imported and collected stays until the end. The collector need not walk it, neither
# while it comes to be nor in each of its later rounds, which take a second then.
gc.disable()

# A shell that is not interactive starts what it leaves in the background with SIGINT ignored, and
# all processes of the tests would inherit it, also those that are to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("tests.timings",)

ROOT = Path(__file__).parent
BUCKET = "dtckpt-tests"

SLOW = (
    "optimizers/test_pairwise.py",
    "operators/test_sweep.py",
    "dtensor/test_compile.py",
    "checkpoint/job_state/test_matrix.py",
    "tools/bench/test_rows.py",
    "checkpoint/test_fsdp.py",
    "checkpoint/manager/test_torchrun.py",
    "test_start_methods.py",
    "dtensor/ops/test_reductions.py",
    "compiling/test_compiling.py",
    "checkpoint/sharing/test_on_host.py",
    "test_readme.py",
    "checkpoint/ranks/test_calls.py",
    "operators/test_coverage.py",
    "checkpoint/test_failures.py",
    "dtensor/ops/test_losses.py",
    "storage/remote/fsspec/test_s3.py",
    "tools/cli/test_report.py",
    "dtensor/elastic/test_elastic_steps.py",
    "tools/bench/test_dispatch.py",
    "checkpoint/ranks/test_wires.py",
    "checkpoint/saving/test_save_hazards.py",
    "dtensor/test_new_placement.py",
    "servers/test_stores.py",
    "storage/remote/obstore/test_trouble.py",
    "checkpoint/test_leaks.py",
    "dtensor/tensor/test_random_view_writes.py",
    "dtensor/test_dealt_placements.py",
    "tools/bench/test_training.py",
    "dtensor/combined/test_training.py",
    "checkpoint/test_kill.py",
    "dtensor/fsdp/test_beside_torch.py",
    "checkpoint/test_steps.py",
    "servers/test_faults.py",
    "dtensor/ops/test_ragged.py",
    "checkpoint/files/test_hostile.py",
    "servers/test_outages.py",
    "dtensor/debug/test_collective_check.py",
    "dtensor/comm/test_traffic.py",
    "tools/bench/test_redistribute.py",
    "storage/remote/fsspec/test_listing.py",
    "servers/test_fake_s3.py",
    "dtensor/ops/test_indexing.py",
    "checkpoint/files/test_commit_states.py",
    "test_packaging.py",
    "dtensor/random/test_random.py",
    "operators/test_metas.py",
    "storage/remote/obstore/test_store.py",
    "tools/cli/test_reshard.py",
    "dtensor/ops/test_contraction.py",
    "checkpoint/files/test_fuzz.py",
    "dtensor/ops/test_ops.py",
    "dtensor/mesh/test_interop.py",
    "servers/test_checkpoints.py",
    "dtensor/tensor/test_gradients.py",
    "frameworks/test_transformers.py",
    "storage/local/test_file_systems.py",
    "checkpoint/ranks/test_rendezvous.py",
    "dtensor/ops/test_views.py",
    "checkpoint/test_cleaning.py",
)
"""Files of some 10 s and more, the longest first: processes that share the tests begin with them,
or one would be at such a file long after the others are done."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow files first where several processes share the tests."""
    if not hasattr(config, "workerinput"):
        return
    place = {ROOT / name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Set apart what is there before the tests: the collector looks at what they make."""
    gc.collect()
    gc.freeze()
    gc.enable()


@dataclass(frozen=True, slots=True)
class S3:
    """Where the server is, how to reach it, and a client that goes around the store."""

    store: Store
    """Rooted where no other test is."""
    url: str
    """The root of ``store``."""
    options: dict[str, Any]
    client: Any

    def key(self, name: str) -> str:
        """The key of ``name`` below ``url``."""
        return f"{self.url.removeprefix(f's3://{BUCKET}/')}/{name}"


@pytest.fixture(scope="session")
def short_pauses() -> Iterator[None]:
    """Stores ask again after milliseconds instead of many seconds."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtckpt.storage.remote.asking._LONGEST_PAUSE", 0.05)
        yield


@pytest.fixture(scope="session")
def s3_endpoint(short_pauses: None) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_client(s3_endpoint: str) -> Any:
    import boto3

    client: Any = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture(scope="session")
def s3_options(s3_endpoint: str) -> dict[str, Any]:
    return {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": s3_endpoint, "region_name": "us-east-1"},
    }


@pytest.fixture(scope="session")
def s3_bucket(s3_options: dict[str, Any]) -> Store:
    """The whole bucket; one connection serves all tests."""
    return open_store(f"s3://{BUCKET}", **s3_options)


@pytest.fixture
def s3(s3_bucket: Store, s3_options: dict[str, Any], s3_client: Any) -> S3:
    store = s3_bucket.substore(uuid.uuid4().hex)
    return S3(store, store.url, s3_options, s3_client)
