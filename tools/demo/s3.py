"""An S3 server on loopback that lives as long as the demo needs it."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

_KEY = "demo"
_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Bucket:
    """An empty bucket and how to reach it."""

    url: str
    endpoint: str

    def storage_options(self) -> dict[str, Any]:
        """Return what ``storage_options`` takes."""
        client = {"endpoint_url": self.endpoint, "region_name": _REGION}
        return {"key": _KEY, "secret": _KEY, "client_kwargs": client}

    def environment(self) -> dict[str, str]:
        """Return the variables by which every S3 client finds the server."""
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
        }


def missing_packages() -> list[str]:
    """Return the packages that the demo needs for S3 and that are not installed."""
    return [name for name in ("boto3", "moto", "s3fs") if find_spec(name) is None]


@contextmanager
def loopback_bucket(name: str) -> Generator[Bucket]:
    """Serve S3 from this process, on a free port of 127.0.0.1, and make a bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    # The server's log of requests would bury what the demo prints.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Where a proxy is set, it cannot reach this machine's loopback.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=_KEY,
            aws_secret_access_key=_KEY,
            region_name=_REGION,
        )
        client.create_bucket(Bucket=name)
        yield Bucket(f"s3://{name}", endpoint)
    finally:
        server.stop()
