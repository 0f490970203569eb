"""All servers, by name: how each is run, and how it is installed where pip does not do that."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from . import azurite, ceph
from .fake_s3 import BUCKET, FakeS3, fake_s3
from .moto import moto
from .objects import RawObjects
from .server import Missing, Server, require


@contextmanager
def own_s3() -> Generator[Server]:
    """Our own server of S3."""
    with fake_s3() as running:
        yield known("fake-s3", f"s3://{BUCKET}", running)


@contextmanager
def own_gcs() -> Generator[Server]:
    """Our own server of Google Cloud Storage."""
    from .fake_gcs import fake_gcs

    with fake_gcs() as running:
        yield known("fake-gcs", f"gs://{BUCKET}", running)


def known(name: str, url: str, running: FakeS3) -> Server:
    """Return what tests know of a server of our own."""
    return Server(
        name=name,
        url=url,
        storage_options=running.storage_options,
        obstore_options=running.obstore_options,
        raw=lambda prefix: RawObjects(running.objects, BUCKET, prefix),
    )


def _nothing() -> None:
    pass


def _true() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A server that can be run."""

    name: str
    run: Callable[[], AbstractContextManager[Server]]
    needs: tuple[str, ...]
    """Modules that pip brings."""
    install: Callable[[], None] = _nothing
    """Brings what pip does not, once; raises Missing."""
    is_installed: Callable[[], bool] = _true

    def __str__(self) -> str:
        return self.name

    def prepare(self) -> None:
        """Install it; Missing if it cannot be had here."""
        require(*self.needs)
        if not self.is_installed():
            self.install()

    def check(self) -> None:
        """Raise Missing, with what to do, if it is not installed."""
        require(*self.needs)
        if not self.is_installed():
            raise Missing("make test-servers installs it")


SERVERS = (
    Kind(name="fake-s3", run=own_s3, needs=("s3fs",)),
    Kind(name="fake-gcs", run=own_gcs, needs=("gcsfs",)),
    Kind(name="moto", run=moto, needs=("s3fs", "boto3", "moto")),
    Kind(
        name="azurite",
        run=azurite.azurite,
        needs=("adlfs",),
        install=azurite.install,
        is_installed=azurite.PROGRAM.exists,
    ),
    Kind(
        name="ceph",
        run=ceph.ceph,
        needs=("s3fs", "boto3"),
        install=ceph.install,
        is_installed=ceph.PROGRAM.exists,
    ),
)

IS_WHOLE = os.environ.get("DTCKPT_FAULTS") == "whole"
"""Whether all lines of the fault matrix are to be run, which takes many minutes, or a few."""
CHOSEN = os.environ.get("DTCKPT_SERVERS", "fake-s3").split(",")
"""The names of those to test with; the quick one alone where nobody chooses."""
