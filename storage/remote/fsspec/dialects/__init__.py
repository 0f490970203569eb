"""What drivers do differently, a file each; ``dialect_of`` knows which."""

from __future__ import annotations

from .az import Az
from .base import Dialect
from .gs import Gs
from .s3 import S3

BY_SCHEME: dict[str, Dialect] = {
    "memory": Dialect(puts_are_atomic=True),
    "s3": S3(),
    "s3a": S3(),
    "gs": Gs(),
    "gcs": Gs(),
    "az": Az(),
    "abfs": Az(),
    "abfss": Az(),
}


def dialect_of(scheme: str) -> Dialect:
    """Return what is known of the driver of a URL's scheme; of most no more than that of all."""
    # Not every object store is told of here: the driver of oss appends to a visible object.
    return BY_SCHEME.get(scheme, Dialect())
