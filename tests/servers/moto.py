"""moto, which knows more of S3 than others; it reads the whole object for every range."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from .s3_clients import RawBucket, client_of, options_for
from .server import Server

_BUCKET = "dtckpt-tests"


@contextmanager
def moto() -> Generator[Server]:
    """Serve from a thread of this process during the block."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = options_for(f"http://{host}:{port}")
        client = client_of(options)
        client.create_bucket(Bucket=_BUCKET)
        yield Server(
            name="moto",
            url=f"s3://{_BUCKET}",
            storage_options=options,
            raw=lambda prefix: RawBucket(client, _BUCKET, prefix),
        )
    finally:
        server.stop()
