"""Lazy re-exports (PEP 562), so that importing a package loads only what is used of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module ``__getattr__`` for ``package``.

    ``modules`` has the modules that define its public names, relative to the package, and the names
    of each, with blanks between them.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name], package), name)

    return __getattr__
