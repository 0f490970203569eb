"""What obstore raises, and what it means: what the server said is in the text of its errors alone.

Errors name the URL that was asked, which may carry a signature that opens the store. It is taken
out.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from dtckpt.interrupts import raised_by_signal_handler

from ..trouble import Kind, Told, Trouble, meaning, scrubbed

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(.*?)</Code>|\"code\":\s*\"(\w+)\"")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_HTTP = re.compile(r"HttpError \{\s*kind: (\w+)")
_NO_BUCKET = "The specified bucket does not exist"
_REGION = "without LOCATION"
_RANGE = re.compile("InvalidRangeRequest|CONTENT_RANGE")
"""A reply of another range than was asked for: Azurite's to one that begins at the end."""
_CREDENTIALS = re.compile(r"token request|/latest/(?:api/token|meta-data)|/computeMetadata/")
"""What is asked for them, and not for the store."""
_LONGEST = 300

_HTTP_KINDS = {"Connect": Kind.UNREACHABLE, "Timeout": Kind.TIMED_OUT}
"""Of a request that was not answered, or not to the end; others were lost on the way."""
_CLASSES = {
    "FileNotFoundError": Kind.MISSING,
    "AlreadyExistsError": Kind.CONDITION,
    "PreconditionError": Kind.CONDITION,
    "PermissionDeniedError": Kind.DENIED,
    "UnauthenticatedError": Kind.EXPIRED,
}


@contextmanager
def explained() -> Generator[None]:
    """Raise what obstore raises in the block as ``Told``."""
    try:
        yield
    except Told:
        raise
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        text = str(error)
        shown = error if scrubbed(text) == text else type(error)(scrubbed(text))
        raise Told(_described(text), _trouble(error)) from shown


def _trouble(error: Exception) -> Trouble:
    text, name = str(error), type(error).__name__
    status, code = _STATUS.search(text), _CODE.search(text)
    number, called = int(status[1]) if status else 0, (code[1] or code[2]) if code else ""
    if _NO_BUCKET in text:
        return Trouble(Kind.NO_BUCKET, number, called)
    of_credentials = _CREDENTIALS.search(text) is not None
    if number == 404 and name == "GenericError" and not called:
        of_credentials = True  # of what is asked for itself it has classes of errors
    if of_credentials and 400 <= number < 500:
        return Trouble(Kind.UNFETCHED, number)
    if number:
        return Trouble(meaning(number, called, _CLASSES.get(name)), number, called)
    if name == "GenericError" and _REGION not in text and not _RANGE.search(text):
        found = _HTTP.search(text)
        return Trouble(_HTTP_KINDS.get(found[1] if found else "", Kind.LOST))
    return Trouble(_CLASSES.get(name, Kind.OTHER))  # what obstore itself refuses


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
    return scrubbed(line)[:_LONGEST]
