"""Object names: what is allowed, how they join, and which ones are reserved.

A name is a relative path of ``str`` components joined by ``/``, the same on every kind of store.
Unfinished writes on file systems live beside their object under a hidden, reserved name.
"""

from __future__ import annotations

import os
import re

UPLOAD_ID = "?uploadId="
"""Stands between the name of an object and the id of an unfinished upload to it."""

_UNFINISHED = r"\.(.+)\.(?:[0-9a-f]{16}\.tmp|lock)"
_RESERVED = re.compile(rf"{_UNFINISHED}|.*{re.escape(UPLOAD_ID)}.*", re.DOTALL)
_HIDDEN = re.compile(_UNFINISHED, re.DOTALL)

# The longest file name is 255 bytes on most file systems; a reserved name adds 22 to its own.
_STEM_BYTES = 200


def check_name(name: str, *, reserved: bool = False) -> str:
    """Return ``name``, or raise ``ValueError`` if it cannot name an object.

    Names of unfinished writes are refused unless ``reserved`` is true.
    """
    # Backslash and NUL mean different things to different stores; lone surrogates have no UTF-8.
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"bad object name {name!r}: empty, '.' and '..' components are refused")
    if "\\" in name or "\0" in name:
        raise ValueError(f"bad object name {name!r}: backslash and NUL are refused")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"bad object name {name!r}: it cannot be encoded as UTF-8") from None
    if not reserved and any(_RESERVED.fullmatch(part) for part in parts):
        raise ValueError(f"bad object name {name!r}: it is reserved for unfinished writes")
    return name


def is_valid(name: str) -> bool:
    """Whether ``name`` can name an object; other programs may have left some that cannot."""
    try:
        check_name(name)
    except ValueError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is ``""`` (everything) or a valid name, else raise ``ValueError``."""
    return check_name(prefix) if prefix else prefix


def check_component(name: str) -> str:
    """Return ``name`` if it is a valid name of a single component, else raise ``ValueError``."""
    if "/" in name:
        raise ValueError(f"bad name {name!r}: expected a single component")
    return check_name(name)


def join(base: str, name: str) -> str:
    """Join a URL, directory or prefix with a name; either may be empty."""
    if not base or not name or base.endswith("/"):
        return base + name
    return f"{base}/{name}"


def reserved_name(base: str) -> str:
    """A fresh hidden name for an unfinished write of the file called ``base`` (no directories)."""
    stem = base.encode()[:_STEM_BYTES].decode(errors="ignore")
    return f".{stem}.{os.urandom(8).hex()}.tmp"


def lock_name(base: str) -> str:
    """The hidden name that a writer of the file called ``base`` takes, for itself alone."""
    return f".{base}.lock"


def target_of(name: str) -> str | None:
    """What an unfinished write was to become, of long names their beginning; None if it is none."""
    target, found, _ = name.partition(UPLOAD_ID)
    if found:
        return target
    directory, _, base = name.rpartition("/")
    match = _HIDDEN.fullmatch(base)
    return None if match is None else join(directory, match[1])


def is_reserved(name: str) -> bool:
    """Whether the last component of ``name`` is that of an unfinished write."""
    return _RESERVED.fullmatch(name.rpartition("/")[2]) is not None
