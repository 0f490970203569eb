"""What every store must do, as tests: for those who write a ``Store``.

A subclass of ``StoreTests`` gives the fixture ``store``, a fresh and empty one for each test, and
is collected by pytest, which this needs. docs/storage.md has a worked example.
"""

from __future__ import annotations

import pytest

from ...base import Store
from .basics import BAD_NAMES, DATA, Interrupted, Raw, Suite, ThroughStore, names, race, write
from .naming import NamingTests
from .publishing import PublishingTests
from .racing import RacingTests
from .reading import ReadingTests
from .writing import WritingTests

__all__ = [
    "BAD_NAMES",
    "DATA",
    "Interrupted",
    "Raw",
    "StoreTests",
    "Suite",
    "names",
    "race",
    "write",
]


class StoreTests(ReadingTests, WritingTests, PublishingTests, NamingTests, RacingTests):
    """All of the suite. Subclasses give the fixture ``store``, and had better give ``raw``, too."""

    @pytest.fixture
    def raw(self, store: Store) -> Raw:
        """Another way to the same bytes, by which the suite sees whether the store is right.

        By default it is the store itself, which finds less.
        """
        return ThroughStore(store)
