"""Some ranks during one save or load, and what there is to ask of them."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dtckpt.errors import CheckpointError

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a rank may show no sign of life, or not get on, once another one waits for it."""

Answers = Mapping[int, bytes]

_alone: dict[int, dict[str, Any]] = {}
"""What ranks without a group keep, by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How the coordinator makes a decision of the answers of all ranks."""

    decide: Callable[[Answers, Mapping[int, str]], bytes]
    """Runs on the coordinator, with the answers and with the ranks that are lost and why."""
    fatal: Callable[[bytes], bool]
    """Whether after such an answer the others are not waited for any longer."""
    without: frozenset[int] = frozenset()
    """Ranks that take no part."""
    within: float | None = None
    """Seconds after which a rank is lost, by default the timeout."""


class Ranks(ABC):
    """Some ranks, of which this process (or thread) is one, during one save or load."""

    def __init__(
        self,
        rank: int,
        everyone: tuple[int, ...],
        memory: dict[str, Any],
        wrong: str,
        call: int = 0,
    ) -> None:
        self.rank = rank
        """Global number of this rank."""
        self.all = everyone
        """Global numbers of all ranks that take part, that of the coordinator first."""
        self.memory = memory
        """What these ranks keep from one save or load to the next."""
        self.call = call
        """Number of the save or load over the group, the same on all ranks."""
        self._wrong = wrong
        self.waited_seconds = 0.0
        """How long this rank has waited for answers and decisions of others."""
        self._progress_at = time.monotonic()

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == self.all[0]

    def begin(self, phase: str) -> None:
        """Note which part of the work this rank is at from here on; others are told of it.

        Raises CheckpointError if the call was made with wrong arguments, so that all learn of it.
        """
        self.tell_alive()
        if self._wrong:
            raise CheckpointError(self._wrong)

    @abstractmethod
    def consult(self, answer: bytes, asked: Round) -> bytes:
        """Give an answer and return what the coordinator decides on all of them.

        Raises RankFailed where the coordinator itself is lost.
        """

    def tell_alive(self) -> None:
        """Note that a long phase is getting on; cheap enough to call often."""
        self._progress_at = time.monotonic()

    def stalled_seconds(self) -> float:
        """How long this rank's own work has not got on; 0 while it waits for others."""
        return time.monotonic() - self._progress_at

    @abstractmethod
    def is_called_off(self) -> bool:
        """Whether some rank has failed in this phase while this rank is still at it."""

    @abstractmethod
    def is_broken(self) -> bool:
        """Whether this phase is called off, or a rank is lost that would have to take part.

        Asked again and again by whoever waits for the others in some other way than a round.
        """

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """End the save or load; others who are still at it learn that this rank is not."""


class Solo(Ranks):
    """A single rank without a process group: there is nobody to wait for, or to tell."""

    def __init__(self, rank: int = 0, wrong: str = "") -> None:
        super().__init__(rank, (rank,), _alone.setdefault(rank, {}), wrong)

    def consult(self, answer: bytes, asked: Round) -> bytes:
        self.tell_alive()
        return asked.decide({self.rank: answer}, {})

    def is_called_off(self) -> bool:
        return False

    def is_broken(self) -> bool:
        return False

    def close(self, error: BaseException | None = None) -> None:
        pass


def _forget_in_child() -> None:
    # What a forked process inherits of a save under way will never end in it.
    for memory in _alone.values():
        memory.clear()


os.register_at_fork(after_in_child=_forget_in_child)
