"""What a measured system can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..state import State


class Saver(Protocol):
    """Saves a state into a directory, by all ranks that have it."""

    name: str

    def save(self, state: State, path: Path) -> None:
        """Return when the state is durable."""
        ...


class System(Saver, Protocol):
    """Loads it from there, too."""

    def load(self, state: State, path: Path) -> None:
        """Fill the tensors of a state in place, the layout being that of the save."""
        ...


class Pending(Protocol):
    """A save that goes on in the background."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Any:
        """Wait for its end; raises what went wrong."""
        ...


StartSave = Callable[[State, Path], Pending]


class Missing(Exception):
    """A system that cannot be measured here; the message says why."""
