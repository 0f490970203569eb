"""obstore's stores of a bucket, one pair in each process, and how they are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

from dtckpt.errors import StorageError

from ...base import Store
from .. import asking
from ..fsspec.store import FsspecStore
from ..limit import limit_of
from .failures import explained
from .options import Settings, for_s3fs, settings_of
from .places import Kind, Place

NUM_PARTS = 4
"""Parts of an upload in flight; an upload holds three more in memory, which fill, wait and are
taken over."""

_UPLOAD_RETRIES = 1000  # it is the deadline that ends them
_UPLOAD_BACKOFF = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=10),
    "base": 2,
}

T = TypeVar("T")

_used_in: int | None = None
"""The process in which obstore was first asked for something."""


class Connection:
    """Makes the stores of a bucket. ``options`` are the user's storage options.

    ``StorageError`` if obstore is not installed, ``TypeError`` for options that it does not take,
    ``ValueError`` for a URL that cannot be a root.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.place = Place.of(url)
        self._url = url
        self._options = dict(options)
        self._deadline = asking.deadline_of(options)
        self._beside: Store | None = None
        # Made when it is needed: locks and limits do not cross a fork.
        self._asked: asking.Connection | None = None
        settings = settings_of(self.place.kind, options, account=self.place.account)
        # Retrying is ours, but for the parts of an upload, which obstore sends by itself.
        self._direct = _make(self.place, settings, {"max_retries": 0})
        patient = {
            "max_retries": _UPLOAD_RETRIES,
            "backoff": _UPLOAD_BACKOFF,
            "retry_timeout": timedelta(seconds=self._deadline),
        }
        self._patient = _make(self.place, settings, patient | settings.retry)

    def beside(self) -> Store | None:
        """The bucket by the driver of fsspec, for what obstore does not know; None if it cannot be.

        That is where it is not installed, or does not understand the options.
        """
        if self._beside is None and self.place.kind == "s3" and find_spec("s3fs") is not None:
            options = for_s3fs(self._options)
            if options is not None:
                self._beside = FsspecStore(self.place.base, **options)
        return self._beside

    def __reduce__(self) -> tuple[Any, ...]:
        return Connection, (self._url, self._options)

    def ask(
        self,
        action: str,
        where: str,
        call: Callable[[Any], T],
        *,
        attempt: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Return what ``call(store)`` does, as ``asking.Connection.ask``."""

        def once() -> T:
            with explained():
                return call(self._direct)

        return self._connect().ask(action, where, once, attempt=attempt)

    def upload(
        self,
        where: str,
        pieces: Iterable[T],
        call: Callable[[Any, Iterator[T], int], object],
    ) -> None:
        """``call(store, pieces, parts)``, with a store that repeats its requests by itself.

        It takes as long as the data; the deadline is for each of its requests. So many parts may
        be in flight. It is called again only where no piece was taken: obstore does not repeat the
        request that begins an upload to Google if that is not answered.
        """
        connection = self._connect()
        attempts = asking.Attempts(connection, "write", where)
        is_begun = False

        def taken() -> Iterator[T]:
            nonlocal is_begun
            for piece in pieces:
                is_begun = True
                yield piece

        while True:
            try:
                with explained():
                    call(self._patient, taken(), min(NUM_PARTS, connection.limit.allowed))
            except OSError as error:
                if is_begun:
                    attempts.pause(error, again=False)
                attempts.failed(error)
            else:
                attempts.succeeded()
                return

    def in_time(self, share: float = 1.0) -> AbstractContextManager[None]:
        """What is asked in the block has one deadline together."""
        return self._connect().in_time(share)

    def _connect(self) -> asking.Connection:
        _refuse_after_fork(self.place.base)
        if self._asked is None:
            limit = limit_of(self.place.base, self._options)
            self._asked = asking.Connection(self._direct, self._deadline, limit)
        return self._asked


def _refuse_after_fork(base: str) -> None:
    """Raise instead of hanging: obstore's threads, one set in a process, do not survive a fork."""
    global _used_in
    pid = os.getpid()
    if _used_in is None:
        _used_in = pid
    if _used_in != pid:
        raise StorageError(
            f"cannot use {base} in this process: it was forked from one that had "
            "used obstore before, whose threads are not here. Start processes by 'spawn' or "
            "'forkserver', fork before anything is saved or loaded, or pass engine='fsspec'"
        )


def _make(place: Place, settings: Settings, retry: dict[str, Any]) -> Any:
    try:
        import obstore.store
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise StorageError(
            "engine='obstore' is not installed: pip install 'dtckpt[obstore]'"
        ) from error
    kinds: dict[Kind, Any] = {
        "s3": obstore.store.S3Store,
        "gcs": obstore.store.GCSStore,
        "azure": obstore.store.AzureStore,
    }
    more: dict[str, Any] = {}
    if settings.credential_provider is not None:
        more["credential_provider"] = settings.credential_provider
    try:
        return kinds[place.kind](
            place.bucket,
            config=located(place, settings.config),
            client_options=settings.client,
            retry_config=retry,
            **more,
        )
    except (BaseError, ValueError, TypeError) as error:
        said = str(error).partition("\n")[0]
        raise TypeError(f"engine='obstore' cannot open {place.base} like this: {said}") from error


def located(place: Place, config: dict[str, Any]) -> dict[str, Any]:
    """The settings with the bucket in the name of the host, where that is asked for."""
    endpoint = config.get("endpoint")
    if place.kind != "s3" or not endpoint or not config.get("virtual_hosted_style_request"):
        return config
    scheme, _, host = str(endpoint).partition("://")
    if host.startswith(f"{place.bucket}."):
        return config
    return config | {"endpoint": f"{scheme}://{place.bucket}.{host}"}
