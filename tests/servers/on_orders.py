"""The S3 server of the tests as a program that takes orders from its standard input.

It prints its endpoint and bucket, then for each line how many requests there were since the last:
``latency SECONDS``, ``clear START`` (of keys) or ``count``. It ends with its input.
"""

from __future__ import annotations

import sys

from .fake_s3 import BUCKET, FakeS3, fake_s3


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


if __name__ == "__main__":
    with fake_s3() as running:
        print(running.endpoint, BUCKET, flush=True)
        for line in sys.stdin:
            print(obey(running, line), flush=True)
