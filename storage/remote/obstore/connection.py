"""obstore's stores of a bucket, one pair in each process, and how they are asked."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from time import monotonic, sleep
from typing import Any, TypeVar

from dtckpt.errors import StorageError

from ...base import Store
from ..fsspec_store import FsspecStore
from .failures import is_transient, status_of, translated
from .options import DEADLINE_SECONDS, Settings, for_s3fs, settings_of
from .places import Kind, Place

_UPLOAD_RETRIES = 12
_UPLOAD_BACKOFF = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=10),
    "base": 2,
}

_SHARE_OF_STRANGERS = 0.1
"""Of the deadline: a host that has not answered, not even once, may be a wrong setting."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

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
        given = options.get("deadline")
        self.deadline = DEADLINE_SECONDS if given is None else float(given)
        self._beside: Store | None = None
        self._was_heard = False
        settings = settings_of(self.place.kind, options, account=self.place.account)
        # Retrying is ours, but for the parts of an upload, which obstore sends by itself.
        self._direct = _make(self.place, settings, {"max_retries": 0})
        patient = {
            "max_retries": _UPLOAD_RETRIES,
            "backoff": _UPLOAD_BACKOFF,
            "retry_timeout": timedelta(seconds=self.deadline),
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
        self, action: str, where: str, call: Callable[[Any], T], *, patiently: bool = False
    ) -> T:
        """Return what ``call(store)`` does, which is called again after failures that pass.

        Raises ``StorageError`` that says ``cannot {action} {where}``, which ``is_certain`` if each
        attempt was refused; in a forked process, too. ``patiently``: the call is made once, with
        a store that repeats its requests by itself.
        """
        _refuse_after_fork(self.place.base)
        begun, num_failed, were_refused = monotonic(), 0, True
        while True:
            try:
                with translated(action, where):
                    result = call(self._patient if patiently else self._direct)
                self._was_heard = True
                return result
            except StorageError as error:
                were_refused = error.is_certain = error.is_certain and were_refused
                cause = error.__cause__
                self._was_heard |= cause is not None and status_of(cause) is not None
                if patiently or cause is None or not is_transient(cause):
                    raise
                # Full jitter: ranks that were refused together do not come again together.
                bound = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(num_failed, 16))
                pause, num_failed = bound * random.random(), num_failed + 1
                spent = monotonic() - begun
                if spent + pause >= self.deadline * (1 if self._was_heard else _SHARE_OF_STRANGERS):
                    text = f"{error.strerror or error}; given up after {spent:.1f} s, attempts: "
                    late = StorageError(errno.ETIMEDOUT, f"{text}{num_failed}")
                    raise late from cause
            sleep(pause)


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
