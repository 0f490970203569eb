"""What a measured system can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..state import ShardedState


class System(Protocol):
    """Saves a state into a directory and loads it from there; all ranks call it together."""

    name: str

    def save(self, state: ShardedState, path: Path) -> None:
        """Return when the state is durable."""
        ...

    def load(self, state: ShardedState, path: Path) -> None:
        """Fill the tensors of a state in place, the layout being that of the save."""
        ...


class Plain(Protocol):
    """Saves and loads tensors of one process that are not distributed."""

    name: str

    def save_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Return when the tensors are durable."""
        ...

    def load_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Fill the tensors in place."""
        ...


class Pending(Protocol):
    """A save that goes on in the background."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Any:
        """Wait for its end; raises what went wrong."""
        ...


StartSave = Callable[[ShardedState, Path], Pending]


class Missing(Exception):
    """A system that cannot be measured here; the message says why."""
