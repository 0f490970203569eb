"""What a server has been asked to write one object, how often, and what it answered."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from dtckpt.errors import StorageError

from .trouble import Kind, told

counting: ContextVar[Requests | None] = ContextVar("dtckpt_counting", default=None)
"""What counts the bodies that are sent from this context."""


@final
class Requests:
    """What is asked of a server to write one object, in any number of attempts."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_attempts = 0
        self._num_refused = 0

    @contextmanager
    def attempt(self) -> Generator[None]:
        """The driver is asked once in the block."""
        before = self._num_sent
        self._num_attempts += 1
        # The driver works in a thread of its own, in a copy of this context.
        token = counting.set(self)
        try:
            yield
        except Exception as error:
            self._num_refused += told(error).is_refusal and self._num_sent == before + 1
            raise
        finally:
            counting.reset(token)

    def is_last_word(self, error: StorageError) -> bool:
        """Whether nothing comes of it after this failure.

        Each attempt was a single request, which was answered with a refusal; or there was none, and
        the error says so. What was not answered, or not clearly, may still be carried out.
        """
        if not self._num_attempts:
            return error.is_certain
        return self._num_refused == self._num_attempts

    def sent(self) -> None:
        """Count a body that goes out."""
        self._num_sent += 1


def on_condition(
    ask: Callable[[dict[str, Any]], None], condition: dict[str, Any], look: Callable[[], object]
) -> None:
    """Call ``ask(condition)``, and without one where the server knows no conditions.

    ``look()`` is called before that; it raises if the condition does not hold now.
    """
    try:
        ask(condition)
    except StorageError as error:
        if not condition or told(error).kind is not Kind.UNKNOWN:
            raise
    else:
        return
    look()
    ask({})
