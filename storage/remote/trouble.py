"""What a failure of a driver means: the one place that knows how each of them fails.

Drivers raise errors of the libraries below them. These are known by the reply that they carry, or
by the names of their classes, so that none of them is imported.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any

from dtckpt.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageTimeout,
)


class Kind(Enum):
    """Failures, by what the caller does about them."""

    MISSING = auto()
    NO_BUCKET = auto()
    CONDITION = auto()
    """Another object is there, or none, than the request was on condition of."""
    CONFLICT = auto()
    """Another conditional request is under way; nothing is said of how it ends."""
    UNKNOWN = auto()
    """The server does not know such requests."""
    DENIED = auto()
    EXPIRED = auto()
    UNFETCHED = auto()
    """No credentials could be had from where they are kept; the store has not seen any."""
    SKEWED = auto()
    """The clock here is too far from the server's for it to believe a signature."""
    FULL = auto()
    THROTTLED = auto()
    BUSY = auto()
    """The server failed, and may not the next time."""
    LOST = auto()
    """The connection broke."""
    TIMED_OUT = auto()
    UNREACHABLE = auto()
    OTHER = auto()


PASSING = frozenset(
    {Kind.CONFLICT, Kind.THROTTLED, Kind.BUSY, Kind.LOST, Kind.TIMED_OUT, Kind.UNREACHABLE}
)
"""What may go well the next time."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is known of a failure."""

    kind: Kind
    status: int = 0
    """Of the reply; 0 where the server has not answered, as far as the driver tells."""
    code: str = ""
    retry_after: float | None = None
    """In seconds, where the server has said so."""

    @property
    def is_refusal(self) -> bool:
        """Whether the server has answered that it will not do it."""
        if self.kind in (Kind.UNKNOWN, Kind.CONFLICT):
            return True
        return 400 <= self.status < 500 and self.status not in (408, 429)


class Told(OSError):
    """A failure of which a driver's own part of this package knows what it means."""

    def __init__(self, text: str, trouble: Trouble) -> None:
        super().__init__(text)
        self.trouble = trouble


_STATUSES = {
    304: Kind.CONDITION,
    401: Kind.EXPIRED,
    402: Kind.DENIED,
    403: Kind.DENIED,
    404: Kind.MISSING,
    408: Kind.TIMED_OUT,
    412: Kind.CONDITION,
    429: Kind.THROTTLED,
    500: Kind.BUSY,
    501: Kind.UNKNOWN,
    502: Kind.BUSY,
    503: Kind.THROTTLED,
    504: Kind.BUSY,
    507: Kind.FULL,
}

# As S3, Azure and those that speak like them call it; it counts before the status.
_CODES = {
    "NoSuchBucket": Kind.NO_BUCKET,
    "ContainerNotFound": Kind.NO_BUCKET,
    "ContainerBeingDeleted": Kind.NO_BUCKET,
    "BlobAlreadyExists": Kind.CONDITION,
    "ConditionNotMet": Kind.CONDITION,
    "ConditionalRequestConflict": Kind.CONFLICT,
    "OperationAborted": Kind.CONFLICT,
    "NotImplemented": Kind.UNKNOWN,
    "AccessDenied": Kind.DENIED,
    "ExpiredToken": Kind.EXPIRED,
    "ExpiredTokenException": Kind.EXPIRED,
    "InvalidToken": Kind.EXPIRED,
    "RequestExpired": Kind.EXPIRED,
    "TokenRefreshRequired": Kind.EXPIRED,
    "RequestTimeTooSkewed": Kind.SKEWED,
    "QuotaExceeded": Kind.FULL,
    "InsufficientStorage": Kind.FULL,
    "XMinioStorageFull": Kind.FULL,
    "SlowDown": Kind.THROTTLED,
    "ServerBusy": Kind.THROTTLED,
    "RequestLimitExceeded": Kind.THROTTLED,
    "Throttling": Kind.THROTTLED,
    "ThrottlingException": Kind.THROTTLED,
    "TooManyRequests": Kind.THROTTLED,
    "InternalError": Kind.BUSY,
    "OperationTimedOut": Kind.BUSY,
    "XAmzContentSHA256Mismatch": Kind.BUSY,
    "RequestTimeout": Kind.TIMED_OUT,
}

# Of classes and those they are derived from, the first that is found here. Of botocore, aiohttp,
# azure.core, google.auth, requests and fsspec.
_CLASSES = {
    "ClientConnectorSSLError": Kind.OTHER,
    "ClientConnectorCertificateError": Kind.OTHER,
    "SSLError": Kind.OTHER,
    "InvalidURL": Kind.OTHER,
    "NonHttpUrlClientError": Kind.OTHER,
    "EndpointConnectionError": Kind.UNREACHABLE,
    "ConnectTimeoutError": Kind.UNREACHABLE,
    "ClientConnectorError": Kind.UNREACHABLE,
    "ConnectionTimeoutError": Kind.UNREACHABLE,
    "ServiceRequestError": Kind.UNREACHABLE,
    "ReadTimeoutError": Kind.TIMED_OUT,
    "ServiceResponseTimeoutError": Kind.TIMED_OUT,
    "ServerTimeoutError": Kind.TIMED_OUT,
    "FSTimeoutError": Kind.TIMED_OUT,
    "HTTPClientError": Kind.LOST,
    "ClientError": Kind.LOST,
    "HttpProcessingError": Kind.LOST,
    "IncompleteRead": Kind.LOST,
    "IncompleteReadError": Kind.LOST,
    "ResponseParserError": Kind.LOST,
    "ServiceResponseError": Kind.LOST,
    "ChecksumError": Kind.LOST,
    "ProxyError": Kind.BUSY,
    "RequestException": Kind.LOST,
    "NoCredentialsError": Kind.UNFETCHED,
    "PartialCredentialsError": Kind.DENIED,
    "CredentialRetrievalError": Kind.UNFETCHED,
    "TokenRetrievalError": Kind.UNFETCHED,
    "UnauthorizedSSOTokenError": Kind.EXPIRED,
    "ClientAuthenticationError": Kind.UNFETCHED,  # without a reply, which would count
    "RefreshError": Kind.EXPIRED,
    "GoogleAuthError": Kind.UNFETCHED,
}

_BUILTIN: tuple[tuple[type[BaseException], Kind], ...] = (
    (FileNotFoundError, Kind.MISSING),
    (IsADirectoryError, Kind.MISSING),
    (NotADirectoryError, Kind.MISSING),
    (FileExistsError, Kind.CONDITION),
    (PermissionError, Kind.DENIED),
    (TimeoutError, Kind.TIMED_OUT),
    (ConnectionRefusedError, Kind.UNREACHABLE),
    (socket.gaierror, Kind.UNREACHABLE),
    (ConnectionError, Kind.LOST),
)

_ERRNOS = {
    errno.ENOSPC: Kind.FULL,
    errno.EDQUOT: Kind.FULL,
    errno.EHOSTUNREACH: Kind.UNREACHABLE,
    errno.ENETUNREACH: Kind.UNREACHABLE,
}

_REMEDIES = {
    Kind.NO_BUCKET: "the bucket does not exist: make it, or check its name",
    Kind.DENIED: "check the credentials, and what they are allowed to do there",
    Kind.EXPIRED: "the credentials are not valid, or not any more: renew them",
    Kind.UNFETCHED: "no credentials could be fetched: check where they are to come from, such as a "
    "profile, a command or the metadata service of the machine",
    Kind.SKEWED: "the clock of this machine is wrong: set it",
    Kind.FULL: "make room, or have the quota raised",
    Kind.UNREACHABLE: "check the endpoint, and the network",
    Kind.THROTTLED: "the server is busy: ask less of it, or have patience with deadline=",
    Kind.TIMED_OUT: "the server is silent: check it and the network, or have patience by deadline=",
}


def told(error: BaseException) -> Trouble:
    """Return what is known of a failure from the driver's error and those that caused it."""
    if any(_answer(c) is None and _kind_of(c) is Kind.UNFETCHED for c in causes(error)):
        return Trouble(Kind.UNFETCHED)  # for which gcsfs makes up a reply
    for cause in causes(error):
        if isinstance(cause, Told):
            return cause.trouble
        if (answer := _answer(cause)) is not None:
            return answer
    kinds = [kind for cause in causes(error) if (kind := _kind_of(cause)) is not None]
    # Some drivers call missing what they could not ask for.
    others = (kind for kind in kinds if kind is not Kind.MISSING)
    return Trouble(next(others, kinds[0] if kinds else Kind.OTHER))


_SECRET = re.compile(
    r"(\b(?:sig|X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature|access_token)=|"
    r"//[^/@\s:]*:(?=[^/@\s]+@))[^&@\s\"'),]+"
)
"""In a URL what opens a store: a signature, a token, a password."""


def scrubbed(text: str) -> str:
    """Return what a driver says without the secrets of the URLs in it."""
    return _SECRET.sub(r"\1...", text)


def without_secrets(error: Exception) -> Exception:
    """Return an error, or another one in its place where its text, or that of a cause, has any."""
    if all(scrubbed(str(cause)) == str(cause) for cause in causes(error)):
        return error
    return Told(f"{type(error).__name__}: {scrubbed(str(error))}", told(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def remote_error(action: str, where: str, cause: Exception, trouble: Trouble) -> StorageError:
    """Return the error that says ``cannot {action} {where}``, ready to be raised from ``cause``."""
    detail = f"{type(cause).__name__}: {cause}"
    number: int | None = None
    if isinstance(cause, OSError):
        number = cause.errno
        detail = cause.strerror or str(cause) or type(cause).__name__
    if trouble.kind in _REMEDIES:
        detail += f" ({_REMEDIES[trouble.kind]})"
    if trouble.kind is Kind.DENIED and action in ("read", "stat"):
        detail += "; or it is missing: servers do not say so where listing is not allowed"
    message = f"cannot {action} {where}: {detail}"
    match trouble.kind:
        case Kind.MISSING:
            return ObjectNotFound(errno.ENOENT, message)
        case Kind.CONDITION if action != "read":
            return ObjectExists(errno.EEXIST, message)
        case Kind.DENIED | Kind.EXPIRED | Kind.UNFETCHED | Kind.SKEWED:
            return AccessDenied(errno.EACCES, message)
        case Kind.TIMED_OUT:
            return StorageTimeout(errno.ETIMEDOUT, message)
        case _:
            return StorageError(message) if number is None else StorageError(number, message)


def meaning(status: int, code: str, otherwise: Kind | None = None) -> Kind:
    """Return what a reply means: by its code, ``otherwise`` if that is not known, by its status."""
    return _CODES.get(code) or otherwise or _STATUSES.get(status, Kind.OTHER)


def _answer(error: BaseException) -> Trouble | None:
    """Return what the server has answered, if the error holds a reply."""
    if any(cls.__name__ == "HttpProcessingError" for cls in type(error).__mro__):
        return None  # aiohttp's of a reply that breaks off; its code is no answer
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        told: dict[str, Any] = response
        meta = told.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode", 0))
        code = str(told.get("Error", {}).get("Code") or "")
        headers = meta.get("HTTPHeaders")
    else:
        # azure.core, aiohttp, gcsfs
        found = (getattr(error, name, None) for name in ("status_code", "status", "code"))
        status = next((n for n in found if isinstance(n, int) and 300 <= n < 600), 0)
        code = str(getattr(error, "error_code", None) or "")
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    if not status and isinstance(error, OSError) and str(error).startswith("Forbidden: "):
        status = 403  # gcsfs
    if not status and code not in _CODES:
        return None
    kind = meaning(status, code)
    if kind is Kind.MISSING and _kind_of(error) is Kind.UNFETCHED:
        kind = Kind.UNFETCHED  # it was the service of credentials that was asked
    return Trouble(kind, status, code, _retry_after(headers))


def _retry_after(headers: Any) -> float | None:
    """Return the seconds of a Retry-After, which may also be a time by the server's clock."""
    if not isinstance(headers, Mapping):
        return None
    named: dict[str, str] = {str(key).lower(): str(value) for key, value in headers.items()}
    if "retry-after" not in named:
        return None
    try:
        return max(0.0, float(named["retry-after"]))
    except ValueError:
        pass
    try:
        until, now = (parsedate_to_datetime(named[key]) for key in ("retry-after", "date"))
        return max(0.0, (until - now).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None


def _kind_of(error: BaseException) -> Kind | None:
    for cls in type(error).__mro__:
        if cls.__name__ in _CLASSES:
            return _CLASSES[cls.__name__]
    for builtin, kind in _BUILTIN:
        if isinstance(error, builtin):
            return kind
    return _ERRNOS.get(error.errno or 0) if isinstance(error, OSError) else None
