"""Names of uploads in parts that nobody has completed or given up: they are hidden, and paid for.

Each goes by the name of its object with the upload's id behind it, a name that no object has.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from ...names import UPLOAD_ID


def upload_name(name: str, upload_id: str) -> str:
    """Return the reserved name of an upload to the object ``name``."""
    return f"{name}{UPLOAD_ID}{quote(upload_id, safe='')}"


def split_upload(name: str) -> tuple[str, str | None]:
    """Return an object's name and the id of an upload to it, if it is one that is named."""
    target, found, upload_id = name.partition(UPLOAD_ID)
    return target, unquote(upload_id) if found else None
