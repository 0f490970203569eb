"""When an object was certainly not written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage.remote.requests import Requests


class Reply(Exception):
    """As botocore raises it."""

    def __init__(self, status: int) -> None:
        self.response: dict[str, Any] = {"ResponseMetadata": {"HTTPStatusCode": status}}


def asked(*attempts: tuple[int, int]) -> Requests:
    """Return requests of attempts that each sent so many bodies and got that reply, or none (0)."""
    requests = Requests()
    for num_sent, status in attempts:
        with suppress(Reply), requests.attempt():
            for _ in range(num_sent):
                requests.sent()
            if status:
                raise Reply(status)
    return requests


def failed(*, is_certain: bool = False) -> StorageError:
    """Return the error that a store raises in the end."""
    error = StorageError("cannot write")
    error.is_certain = is_certain
    return error


@pytest.mark.parametrize("status", [400, 403, 409, 412, 499])
def test_refusals_of_single_requests_are_the_last_word(status: int) -> None:
    assert asked((1, status)).is_last_word(failed())
    assert asked((1, 409), (1, status)).is_last_word(failed())


@pytest.mark.parametrize("status", [0, 200, 307, 408, 429, 500, 503])
def test_other_replies_or_none_tell_nothing(status: int) -> None:
    assert not asked((1, status)).is_last_word(failed())
    assert not asked((1, status), (1, 403)).is_last_word(failed())


@pytest.mark.parametrize("is_certain", [False, True])
def test_where_nothing_was_asked_the_store_has_the_word(is_certain: bool) -> None:
    assert asked().is_last_word(failed(is_certain=is_certain)) == is_certain


def test_what_the_store_is_certain_of_says_nothing_of_requests_before() -> None:
    assert asked((1, 409)).is_last_word(failed(is_certain=True))
    assert not asked((1, 503)).is_last_word(failed(is_certain=True))


@pytest.mark.parametrize("attempts", [((2, 403),), ((2, 403), (1, 403)), ((1, 403), (2, 403))])
def test_a_refusal_says_nothing_of_a_request_that_was_repeated_on_the_way(
    attempts: tuple[tuple[int, int], ...],
) -> None:
    assert not asked(*attempts).is_last_word(failed())


def test_a_refusal_says_nothing_where_requests_are_not_counted() -> None:
    assert not asked((0, 403)).is_last_word(failed())


def test_an_interrupted_attempt_may_be_under_way() -> None:
    requests = asked((1, 403))

    def interrupted() -> None:
        with requests.attempt():
            requests.sent()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not requests.is_last_word(failed())
