"""When an object was certainly not written."""

from __future__ import annotations

from typing import Any

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage.remote.s3_requests import Requests


class Reply(Exception):
    """As botocore raises it."""

    def __init__(self, status: int) -> None:
        self.response: dict[str, Any] = {"ResponseMetadata": {"HTTPStatusCode": status}}


def failed(status: int, *, is_certain: bool = False) -> StorageError:
    """Return the error of a store for a reply; for none where the status is 0."""
    error = StorageError("cannot write")
    error.is_certain = is_certain
    error.__cause__ = OSError("x")
    error.__cause__.__cause__ = Reply(status) if status else None
    return error


def asked(*num_sent: int) -> Requests:
    """Return requests of calls that each sent so many bodies."""
    requests = Requests()
    for number in num_sent:
        with requests.counted(object()):
            for _ in range(number):
                requests.sent()
    return requests


@pytest.mark.parametrize("status", [400, 403, 409, 412, 499])
def test_a_refusal_of_the_only_request_is_the_last_word(status: int) -> None:
    assert asked(1).is_last_word(failed(status))
    assert asked(1, 1).is_last_word(failed(status))


@pytest.mark.parametrize("status", [0, 200, 307, 408, 429, 500, 503])
def test_other_replies_or_none_tell_nothing(status: int) -> None:
    assert not asked(1).is_last_word(failed(status))


def test_what_the_store_is_certain_of_needs_no_reply() -> None:
    assert asked(1).is_last_word(failed(0, is_certain=True))
    assert not asked(2).is_last_word(failed(0, is_certain=True))


@pytest.mark.parametrize("num_sent", [(2,), (2, 1), (1, 2), (0,)])
def test_a_refusal_says_nothing_of_requests_before_or_of_those_not_counted(
    num_sent: tuple[int, ...],
) -> None:
    assert not asked(*num_sent).is_last_word(failed(403))
