"""Buckets of S3 servers by boto3, around our stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def client_of(storage_options: dict[str, Any]) -> Any:
    """Return a client for the server that these options of s3fs lead to."""
    import boto3

    return boto3.client(
        "s3",
        aws_access_key_id=storage_options["key"],
        aws_secret_access_key=storage_options["secret"],
        **storage_options["client_kwargs"],
    )


def options_for(endpoint: str, key: str = "test", secret: str = "test") -> dict[str, Any]:
    """Return what leads s3fs to a server."""
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    return {"key": key, "secret": secret, "client_kwargs": client}


@dataclass(frozen=True, slots=True)
class RawBucket:
    """What is below a prefix of a bucket."""

    client: Any
    bucket: str
    prefix: str

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=data)

    def get(self, name: str) -> bytes | None:
        """``None`` if nothing has this name."""
        try:
            reply = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
        except self.client.exceptions.NoSuchKey:
            return None
        return reply["Body"].read()
