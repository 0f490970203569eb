"""Lazy re-exports (PEP 562), so that importing a package loads only what is used of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module ``__getattr__`` for ``package``.

    ``modules`` maps every public name to the module, relative to the package, that defines it.
    """

    def __getattr__(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name], package), name)

    return __getattr__
