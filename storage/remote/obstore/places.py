"""Where a URL leads: the kind of store, its bucket, and the prefix in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..fsspec.dialects import az

Kind = Literal["s3", "gcs", "azure"]

KINDS: dict[str, Kind] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
"""What obstore serves here, by scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a store URL says."""

    kind: Kind
    bucket: str
    """Or the container."""
    account: str
    """Of Azure, where the URL names one; else empty."""
    base: str
    """The URL of the bucket, to which names are joined for messages."""
    prefix: str
    """Of all objects, without slashes at its ends."""

    @classmethod
    def of(cls, url: str) -> Place:
        """``ValueError`` for a URL that obstore does not serve, or that cannot be a root."""
        scheme, found, rest = url.partition("://")
        scheme = scheme.lower()
        if not found or "::" in url or "?" in rest:
            raise ValueError(f"bad store URL {scheme}://...: expected scheme://bucket/path")
        if scheme not in KINDS:
            served = ", ".join(f"{name}://" for name in KINDS)
            raise ValueError(f"engine='obstore' does not serve {scheme}://, but {served}")
        authority, _, path = rest.partition("/")
        bucket, at, host = authority.partition("@")
        if ":" in authority:
            raise ValueError(
                f"bad store URL {scheme}://...: credentials do not go into it, but into the "
                "storage options (key=, secret=, ...)"
            )
        if not bucket:
            raise ValueError(f"bad store URL {url}: it names no bucket")
        prefix = path.strip("/")
        if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
            raise ValueError(f"bad store URL {url}: empty, '.' and '..' components are refused")
        place = cls(
            kind=KINDS[scheme],
            bucket=bucket,
            account=host.partition(".")[0] if at else "",
            base=f"{scheme}://{authority}",
            prefix=prefix,
        )
        place.check_path(prefix)
        return place

    def check_path(self, path: str) -> str:
        """Return a path in the bucket; ``ValueError`` for one that fsspec's driver would lose."""
        if self.kind == "azure":
            az.check_path(path)
        return path
