"""Objects that stand for their state dict: modules, optimizers, schedulers, data loaders."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """What an object needs to be saved and loaded by its state dict."""

    def state_dict(self) -> Any:
        """Return the state; its tensors are written as they are, views of live ones included."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state of the same structure."""
        ...


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object (not a class) with both methods."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )
