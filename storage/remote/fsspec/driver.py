"""An fsspec file system, one per process, with the settings that make it safe to trust."""

from __future__ import annotations

import os
from typing import Any

from dtckpt.errors import StorageError

from ..asking import Connection, deadline_of
from ..limit import limit_of
from .dialects import dialect_of

# A server that says nothing for this share of the deadline is asked anew.
_IDLE_SHARE = 0.25


_descriptions: list[Any] = []
"""At most one: the loader of a session, with all that it has read."""


class Driver:
    """Makes the file system of a URL on first use in each process.

    The class is looked up at once: ``StorageError`` if it is unknown or not installed, and
    ``ValueError`` for a URL that cannot be a root.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = _canonical(url)
        self.scheme = self.url.partition("://")[0]
        self.dialect = dialect_of(self.scheme)
        self._raw_url = url
        self._options = options
        self._deadline = deadline_of(options)
        # By process id. A file system inherited over a fork cannot be used, nor even finalised:
        # its event loop thread is gone. So it stays referenced here.
        self._made: dict[int, tuple[Connection, str]] = {}
        _require(self.scheme)

    def __reduce__(self) -> tuple[Any, ...]:
        return Driver, (self._raw_url, self._options)

    def beside(self, name: str) -> Driver:
        """The driver of the root called ``name`` in the same parent, with the same options."""
        scheme, _, rest = self._raw_url.rstrip("/").partition("://")
        parent, _, own = rest.rpartition("/")
        if not own or (not parent and scheme.lower() != "memory"):
            raise StorageError(f"{self.url} is a root and has nothing beside it")
        return Driver(f"{scheme}://{parent}/{name}", self._options)

    def around(self) -> Driver | None:
        """The driver of the folder that the root is in; None for that of a bucket."""
        scheme, _, rest = self._raw_url.rstrip("/").partition("://")
        parent = rest.rpartition("/")[0].rstrip("/")
        return Driver(f"{scheme}://{parent}", self._options) if parent else None

    def get(self) -> tuple[Connection, str]:
        """This process's connection and its path of the root, without a trailing slash."""
        pid = os.getpid()
        made = self._made.get(pid)
        if made is None:
            import fsspec

            given = {name: value for name, value in self._options.items() if name != "deadline"}
            options = self.dialect.options(given, self._deadline * _IDLE_SHARE)
            # Listing caches miss what other processes do.
            options |= {"use_listings_cache": False, "skip_instance_cache": True}
            # Two threads may both come here; either result will do, and no lock crosses a fork.
            fs, root = fsspec.url_to_fs(self._raw_url, **options)
            _share_descriptions(fs)
            self.dialect.tame(fs, given)
            connection = Connection(fs, self._deadline, limit_of(self._bucket(), given))
            made = self._made[pid] = (connection, root.rstrip("/"))
        return made

    def _bucket(self) -> str:
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"


def _share_descriptions(fs: Any) -> None:
    """Give an S3 driver that has not connected yet what another one has read from botocore's files.

    These say what the protocol is like, and take some 0.1 s of the processor. Credentials and
    settings are its own, as ever.
    """
    if not hasattr(fs, "call_s3") or fs.session is not None:
        return
    from aiobotocore.session import AioSession

    fs.session = AioSession(**fs.kwargs)  # as the driver would
    if _descriptions:
        fs.session.register_component("data_loader", _descriptions[0])
    else:
        _descriptions.append(fs.session.get_component("data_loader"))


def _canonical(url: str) -> str:
    """The URL for messages: lower-case scheme, no trailing slash, no password."""
    scheme, found, rest = url.partition("://")
    shown = f"{scheme}://..."
    if not found or "::" in url:
        raise ValueError(f"bad store URL {shown}: expected one scheme://path, not chained")
    if "?" in rest:
        raise ValueError(f"bad store URL {shown}: pass what stands after '?' as options")
    scheme = scheme.lower()
    if not rest.strip("/") and scheme != "memory":
        raise ValueError(f"bad store URL {url}: it names no bucket or directory")
    authority = rest.partition("/")[0]
    if dialect_of(scheme).extra and ":" in authority and not authority.startswith("arn:"):
        raise ValueError(
            f"bad store URL {shown}: credentials do not go into it, but into the storage options"
        )
    account, _, _ = authority.rpartition("@")
    if ":" in account:
        rest = f"{account.partition(':')[0]}@{rest[len(account) + 1 :]}"
    return f"{scheme}://{rest.rstrip('/')}"


def _require(scheme: str) -> None:
    """Raise ``StorageError``, saying what to install, unless fsspec has a driver."""
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = dialect_of(scheme).extra
        hint = f"pip install 'dtckpt[{extra}]'" if extra else str(error)
        raise StorageError(f"the driver of {scheme}:// is not installed: {hint}") from error
    except ValueError as error:
        raise StorageError(
            f"nothing is known that serves {scheme}://: install a package that brings a driver of "
            "fsspec, or register an opener (dtckpt.storage.register_scheme)"
        ) from error
