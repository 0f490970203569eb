"""The server that rows about object stores start, and its orders."""

from __future__ import annotations

import pytest

from tests.servers.every import known
from tests.servers.fake_s3 import BUCKET, fake_s3
from tests.servers.on_orders import clear, serving
from tools.bench.frame.team import Team
from tools.bench.object_server import object_server

pytest.importorskip("boto3")


class Alone(Team):
    """A team of one, without torch's process group."""

    def __init__(self) -> None:
        self.rank = 0

    def gather(self, value: object) -> list[object]:
        return [value]


def test_a_server_tells_where_it_is_and_counts() -> None:
    with object_server(Alone()) as server:
        client = pytest.importorskip("tests.servers.s3_clients").client_of(server.options)
        bucket = server.url("").removeprefix("s3://").rstrip("/")
        assert client.meta.endpoint_url == server.endpoint
        for key in ("a/1", "a/2", "b/1"):
            client.put_object(Bucket=bucket, Key=key, Body=b"x")
        assert server.count() == 3
        server.clear("a/")
        found = client.list_objects_v2(Bucket=bucket)["Contents"]
        assert [item["Key"] for item in found] == ["b/1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_servers_are_cleared_by_requests() -> None:
    with fake_s3() as running:
        server = known("another", f"s3://{BUCKET}", running)
        for key in ("a/1", "a/2", "b/1"):
            running.objects.put(BUCKET, key, b"x")
        assert clear(server, "clear a/") == 0
        assert list(running.keys) == ["b/1"]
        with pytest.raises(ValueError, match="another does not know"):
            clear(server, "latency 1")


def test_a_server_that_nobody_knows() -> None:
    with pytest.raises(KeyError, match="nonesuch"), serving("nonesuch"):
        pass
