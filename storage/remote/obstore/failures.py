"""What obstore raises, in our tree: what the server said is in the text of its errors alone."""

from __future__ import annotations

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager

from dtckpt.errors import StorageError

from ...failures import storage_error

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(.*?)</Code>|\"code\":\s*\"(\w+)\"")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_SECRET = re.compile(r"\b(sig|X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature)=[^&\s\"'),]+")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_REGION = "without LOCATION"
_CONFLICT = "ConditionalRequestConflict"
_LONGEST = 300


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that a server answered with; None where none has."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def is_refusal(error: BaseException) -> bool:
    """Whether a server has refused a request for good: nothing comes of it."""
    status = status_of(error)
    return status is not None and 400 <= status < 500 and status not in (408, 429)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    status = status_of(error)
    if status is None:
        # Nobody answered, or not to the end. What obstore itself refuses has other types.
        return type(error).__name__ == "GenericError" and _REGION not in str(error)
    return status in (408, 429, 500, 502, 503, 504) or _CONFLICT in str(error)


def is_condition_failed(error: BaseException | None) -> bool:
    """Whether the server refused because another object is there than the condition says."""
    return type(error).__name__ in ("AlreadyExistsError", "PreconditionError")


def obstore_error(action: str, where: str, cause: Exception) -> StorageError:
    """Return the error that says ``cannot {action} {where}`` for what obstore has raised."""
    text = str(cause)
    if any(sign in text for sign in _NO_BUCKET):
        return StorageError(f"cannot {action} {where}: its bucket does not exist")
    return storage_error(action, where, _as_system_error(cause, _described(text)))


def _as_system_error(cause: Exception, text: str) -> Exception:
    kind = type(cause).__name__
    if isinstance(cause, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, text)
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status_of(cause) in (401, 403):
        return PermissionError(errno.EACCES, text)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return FileExistsError(errno.EEXIST, text)
    if kind == "GenericError":
        return OSError(text)
    return cause


def _described(text: str) -> str:
    """Say what the server said, or else what obstore does, in a line."""
    if _REGION in text:
        return "the bucket is in another region: name it (client_kwargs.region_name, or region)"
    status, code, message = (p.search(text) for p in (_STATUS, _CODE, _MESSAGE))
    if code is not None:
        said = f": {message[1].strip()}" if message is not None else ""
        number = f" (HTTP {status[1]})" if status is not None else ""
        return f"{code[1] or code[2]}{said}{number}"
    line = " ".join(text.partition("Debug source")[0].split())
    return _scrubbed(line)[:_LONGEST]


def _scrubbed(text: str) -> str:
    return _SECRET.sub(r"\1=...", text)


@contextmanager
def translated(action: str, where: str) -> Generator[None]:
    """Turn what obstore raises in the block into our errors; ``is_certain`` after a refusal."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        made = obstore_error(action, where, error)
        made.is_certain = is_refusal(error)
        text = str(error)
        # Errors name the URL that was asked, which may carry a signature that opens the store.
        shown = error if _scrubbed(text) == text else type(error)(_scrubbed(text))
        raise made from shown
