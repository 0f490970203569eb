"""A server of S3 as a program that takes orders from its standard input.

``python -m tests.servers.on_orders [NAME]`` prints the URL of its bucket and the options that lead
there, as JSON, then for each line how many requests there were since the last: ``clear START`` (of
keys), and to our own server, ``fake-s3``, ``latency SECONDS`` and ``count``. It ends with its
input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from .every import SERVERS, known
from .fake_s3 import BUCKET, FakeS3, fake_s3
from .s3_clients import client_of
from .server import Server


def obey(server: FakeS3, order: str) -> int:
    """Do what a line says, and return the number of requests before."""
    what, _, given = order.strip().partition(" ")
    if what == "latency":
        server.latency = float(given)
    elif what == "clear":
        for key in [key for key in server.keys if key.startswith(given)]:
            del server.keys[key]
    count = server.counts.total()
    server.forget()
    return count


def clear(server: Server, order: str) -> int:
    """Do what a line says that any server can; its requests are not counted."""
    what, _, given = order.strip().partition(" ")
    if what != "clear":
        raise ValueError(f"{server.name} does not know {order!r}")
    client, bucket = client_of(server.storage_options), server.url.removeprefix("s3://")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=given):
        for item in page.get("Contents", ()):
            client.delete_object(Bucket=bucket, Key=item["Key"])
    return 0


@contextmanager
def serving(name: str) -> Generator[tuple[Server, Callable[[str], int]]]:
    """Serve during the block; gives the server and what takes its orders."""
    if name == "fake-s3":
        with fake_s3() as running:
            yield known(name, f"s3://{BUCKET}", running), partial(obey, running)
        return
    kinds = {kind.name: kind for kind in SERVERS}
    kinds[name].check()
    with kinds[name].run() as server:
        yield server, partial(clear, server)


if __name__ == "__main__":
    with serving((sys.argv[1:] or ["fake-s3"])[0]) as (found, take):
        print(json.dumps({"url": found.url, "options": found.storage_options}), flush=True)
        for line in sys.stdin:
            print(take(line), flush=True)
