"""Names of tensors with and without what wrappers of modules add to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Generic, TypeVar

T = TypeVar("T")

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile, DDP, FSDP and activation checkpointing add."""
_may_be_wrapped = re.compile("|".join(sorted(_WRAPPERS))).search


def without_wrappers(name: str) -> str:
    """Return a name without what wrappers of modules add to it.

    >>> without_wrappers("model/_orig_mod.module.layers.0.weight")
    'model/layers.0.weight'
    """
    if not _may_be_wrapped(name):
        return name
    return "/".join(
        ".".join([p for p in component.split(".") if p not in _WRAPPERS] or [component])
        for component in name.split("/")
    )


def inner_name(name: str) -> str:
    """Return the name of a parameter within its module, or within the state dict of this."""
    return name.rpartition("/")[2]


class TensorNames(Generic[T]):
    """The names of all tensors of a state or checkpoint, and which of them are one tensor.

    A part of a model may be called ``module`` itself. What wrappers add is left out only where
    there is one tensor to which the rest of the name may belong.

    >>> names = TensorNames({"net/module.a": 1, "net/b": 2, "net/module.b": 3})
    >>> names.find("net/a"), names.find("net/b"), names.find("net/_orig_mod.b")
    ('net/module.a', 'net/b', None)
    >>> names.is_clear("net/_orig_mod.a"), names.is_clear("net/b"), names.is_clear("b")
    (True, False, False)
    """

    def __init__(
        self, tensors: Mapping[str, T], tell: Callable[[T], Hashable] = lambda tensor: tensor
    ) -> None:
        self.tensors = tensors
        """What each name is a name of."""
        self._tell = tell
        """Tells tensors apart; of tied ones it gives the same."""

    def find(self, name: str) -> str | None:
        """Return the tensor that is meant by a name, by the name it has here; None if none is."""
        if name in self.tensors:
            return name
        alike = self._alike.get(without_wrappers(name), [])
        return alike[0] if alike and self._are_one(alike) else None

    def is_clear(self, name: str) -> bool:
        """Whether a name, or one within a module, tells as much without what wrappers add."""
        return without_wrappers(name) not in self._unclear

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        """Names by what is left of them without wrappers."""
        alike: dict[str, list[str]] = {}
        for name in self.tensors:
            alike.setdefault(without_wrappers(name), []).append(name)
        return alike

    @cached_property
    def _unclear(self) -> set[str]:
        """What is left of the names of several tensors, and of their names within modules."""
        several = [short for short, names in self._alike.items() if not self._are_one(names)]
        return {*several, *map(inner_name, several)}

    def _are_one(self, names: list[str]) -> bool:
        return len(names) == 1 or len({self._tell(self.tensors[name]) for name in names}) == 1
